"""Attention of the last rows against a plain softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkv_agents.backends.transformers.attention import (
    explicit_attention,
    run_attention,
    scattered_attention,
    sink_as_key,
)


def reference(query, key, value, *, scaling, window, softcap, sinks=None):
    """Query by query, head by head."""
    heads, rows, head_dim = query.shape[1:]
    tokens, groups = key.shape[2], heads // key.shape[1]
    out = torch.empty(heads, rows, value.shape[3], dtype=torch.float64)
    for head in range(heads):
        for row in range(rows):
            position = tokens - rows + row
            first = 0 if window is None else max(0, position + 1 - window)
            seen = slice(first, position + 1)
            keys, values = (x[0, head // groups, seen].double() for x in (key, value))
            scores = keys @ query[0, head, row].double() * (scaling or head_dim**-0.5)
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double()[None]])
                values = torch.cat([values, torch.zeros_like(values[:1])])
            out[head, row] = scores.softmax(0) @ values
    return out


@settings(max_examples=40)
@given(
    rows=st.integers(1, 12),
    past=st.integers(0, 30),
    heads=st.sampled_from([(1, 1), (3, 1), (6, 3), (9, 9)]),
    scaling=st.sampled_from([None, 0.05]),
    window=st.sampled_from([None, 1, 2, 7, 20, 42, 100]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    has_sinks=st.booleans(),
    value_width=st.sampled_from([8, 4, 16]),
    seed=st.integers(0, 100),
)
def test_rows_see_what_they_should(
    rows, past, heads, scaling, window, softcap, has_sinks, value_width, seed
):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, heads[0], rows, 8, generator=generator)
    key = torch.randn(1, heads[1], past + rows, 8, generator=generator)
    value = torch.randn(1, heads[1], past + rows, value_width, generator=generator)
    sinks = torch.randn(heads[0], generator=generator) if has_sinks else None
    settings = {"scaling": scaling, "window": window, "softcap": softcap, "sinks": sinks}
    actual = run_attention(query, key, value, **settings)
    expected = reference(query, key, value, **settings)
    torch.testing.assert_close(actual[0].double(), expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=40)
@given(
    positions=st.sets(st.integers(0, 60), min_size=1, max_size=12),
    further=st.integers(0, 5),
    heads=st.sampled_from([(1, 1), (3, 1), (6, 3), (9, 9)]),
    scaling=st.sampled_from([None, 0.05]),
    window=st.sampled_from([None, 1, 2, 7, 20, 100]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 100),
)
def test_scattered_rows_see_what_each_would_see_alone(
    positions, further, heads, scaling, window, softcap, has_sinks, seed
):
    """Not the keys behind them: neither those between the rows nor those behind all of them."""
    generator = torch.Generator().manual_seed(seed)
    at = np.array(sorted(positions))
    query = torch.randn(1, heads[0], len(at), 8, generator=generator)
    key, value = torch.randn(2, 1, heads[1], at[-1] + 1 + further, 8, generator=generator)
    sinks = torch.randn(heads[0], generator=generator) if has_sinks else None
    settings = {"scaling": scaling, "window": window, "softcap": softcap, "sinks": sinks}
    actual = scattered_attention(query, key, value, at, **settings)[0].double()
    for row, position in enumerate(at):
        seen = (rows[:, :, : position + 1] for rows in (key, value))
        alone = reference(query[:, :, row : row + 1], *seen, **settings)
        torch.testing.assert_close(actual[:, row : row + 1], alone, atol=1e-5, rtol=1e-4)


def test_a_softcap_without_a_mask_is_causal():
    query, key, value = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    options = {"scaling": None, "softcap": 2.0}
    torch.testing.assert_close(
        explicit_attention(query, key, value, None, **options),
        explicit_attention(query, key, value, mask, **options),
    )
    changed = explicit_attention(query, key, value, mask.new_ones(5, 5), **options)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(changed, explicit_attention(query, key, value, mask, **options))


def test_a_key_in_front_stands_for_sinks():
    """What kernels without a log-sum-exp are given."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 6, 5, 8, generator=generator)
    key, value = torch.randn(2, 1, 3, 9, 8, generator=generator)
    sinks = torch.randn(6, generator=generator)
    expected = reference(query, key, value, scaling=0.2, window=None, softcap=None, sinks=sinks)
    query, key, value, scaling = sink_as_key(query, key, value, sinks, 0.2)
    actual = run_attention(query, key, value, scaling=scaling)
    torch.testing.assert_close(actual[0, ..., :8].double(), expected, atol=1e-5, rtol=1e-4)
