"""Formats of blocks: by attention, by error, by both, and quickly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchkv_agents.checkpoint.precision import (
    PrecisionPolicy,
    assign_formats,
    block_formats,
    low_bit_errors,
)
from patchkv_agents.errors import InputError
from patchkv_kernels import PayloadFormat as Format
from patchkv_kernels import Rope, RopeLayout, dequantize_scatter, quantize_gather

from ..operations import count_calls

POLICY = PrecisionPolicy(alpha=0.5, tau_low=0.1, tau_high=1.0, tau_4=0.2)
ROPE = Rope((100.0 ** (-np.arange(32) / 32)).astype(np.float32), RopeLayout.HALF_SPLIT)


def reference(policy, scores, errors, lengths, tokens):
    """The rules of the policy's docstring, block by block."""
    formats, start = [], 0
    for length in lengths:
        own = slice(start, start + length)
        start += length
        risks = [
            tokens * float(s) * float(e) for s, e in zip(scores[own], errors[own], strict=True)
        ]
        risk = policy.alpha * max(risks) + (1 - policy.alpha) * sum(risks) / length
        # The smallest error that at least 95 % of the rows do not exceed.
        ranked = sorted(errors[own])
        high = next(e for n, e in enumerate(ranked, 1) if n >= 0.95 * length)
        if risk >= policy.tau_high:
            formats.append(Format.F16)
        elif risk < policy.tau_low and high <= policy.tau_4 and min(scores[own]) > 0:
            formats.append(Format.K8V4)
        else:
            formats.append(Format.K8V8)
    return formats


@given(
    lengths=st.lists(st.sampled_from([1, 3, 20, 31, 32]), min_size=1, max_size=12),
    alpha=st.sampled_from([0.0, 0.3, 1.0]),
    zeros=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_formats_follow_the_rules(lengths, alpha, zeros, seed):
    rng = np.random.default_rng(seed)
    rows = sum(lengths)
    scores = rng.exponential(size=rows) ** 3
    scores[rng.random(rows) < 0.02 * zeros] = 0
    scores = (scores / max(scores.sum(), 1e-9)).astype(np.float32)
    errors = rng.uniform(0.05, 0.22, rows).astype(np.float32)
    policy = PrecisionPolicy(alpha=alpha, tau_low=0.1, tau_high=0.8, tau_4=0.2)
    actual = assign_formats(policy, scores, errors, np.array(lengths), tokens=rows)
    assert actual == reference(policy, scores, errors, lengths, rows)


def formats(scores, errors=0.1, policy=POLICY, tokens=None):
    scores = np.array(scores, dtype=np.float32)
    errors = np.broadcast_to(np.float32(errors), scores.shape)
    lengths = np.full(len(scores) // 4, 4)
    return assign_formats(policy, scores, errors, lengths, tokens=tokens or len(scores))


def test_attention_decides():
    # Risk is 8 * score * 0.1, the same for all rows of a block.
    assert formats([0.01] * 4 + [0.24] * 4) == [Format.K8V4, Format.K8V8]
    assert formats([0.001] * 4 + [2.5] * 4) == [Format.K8V4, Format.F16]


def test_thresholds_carry_over_between_lengths():
    """The same text twice as long halves every score, and changes no format."""
    scores = np.array([0.01] * 4 + [0.24] * 4)
    assert formats(scores, tokens=8) == formats(scores / 2, tokens=16)


def test_unknown_attention_keeps_8_bits():
    """Query positions, and rows behind them, have no score: that is not low attention."""
    assert formats([0.01] * 4 + [0.01, 0.01, 0.0, 0.01]) == [Format.K8V4, Format.K8V8]
    assert formats([0.0] * 8) == [Format.K8V8] * 2


def test_blocks_with_large_errors_keep_8_bits():
    scores = np.full(40, 1e-6, dtype=np.float32)
    errors = np.full(40, 0.1, dtype=np.float32)
    errors[0] = errors[20:22] = 0.3  # one row of 20, which the percentile leaves out; two of 20
    lengths = np.array([20, 20])
    assert assign_formats(POLICY, scores, errors, lengths, tokens=40) == [Format.K8V4, Format.K8V8]


def test_what_is_not_finite_is_stored_in_16_bits():
    values = torch.randn(2, 3, 64, 64)
    values[1, 1, 40, 7] = torch.inf
    ranges = [(0, 32, 0), (32, 64, 32)]
    scores = np.full(64, 1 / 64 / 100, dtype=np.float32)
    chosen = block_formats(POLICY, list(values), ranges, scores, tokens=64)
    assert chosen == [Format.K8V4, Format.F16]


@pytest.mark.parametrize("format", [Format.F16, Format.K8V8, Format.K4V4])
def test_a_fixed_format_is_that_of_every_block(format):
    """Whatever attention says; 4-bit keys too, which it never chooses."""
    values = torch.randn(2, 3, 64, 64)
    scores = np.repeat(np.float32([0.001, 2.5]), 32)
    ranges = [(0, 32, 0), (32, 64, 32)]
    chosen = block_formats(PrecisionPolicy.fixed(format), list(values), ranges, scores, tokens=64)
    assert chosen == [format, format]
    assert block_formats(POLICY, list(values), ranges, scores, tokens=64)[1] is Format.F16


def test_errors_are_those_of_4_bit_values():
    """Against values that were really stored and restored; median over sampled layers."""
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 9, 3, 50, 64, generator=generator)
    rows = np.arange(4, 47)
    payload = quantize_gather(keys, values, [(4, 47, 4)], format=Format.K8V4, rope=ROPE)
    restored = [torch.zeros_like(keys), torch.zeros_like(values)]
    dequantize_scatter(payload, rows - 4, rows, rows, *restored, rope=ROPE)
    exact, kept = values[:, :, rows], restored[1][:, :, rows]
    every = (kept - exact).norm(dim=(1, 3)) / exact.norm(dim=(1, 3))
    # 8 layers of 9, evenly spaced: all but the middle one.
    expected = every[[0, 1, 2, 3, 5, 6, 7, 8]].median(0).values
    assert np.allclose(low_bit_errors(list(values), rows), expected.numpy(), rtol=1e-5)


def test_rows_of_zeros_have_no_error():
    values = torch.zeros(2, 3, 4, 64)
    assert not low_bit_errors(list(values), np.arange(4)).any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 1.1},
        {"alpha": -0.1},
        {"tau_low": -1.0},
        {"tau_low": 2.0, "tau_high": 1.0},
        {"tau_4": -1.0},
        {"tau_4": float("nan")},
    ],
)
def test_thresholds_out_of_range_are_refused(wrong):
    with pytest.raises(InputError, match="use"):
        PrecisionPolicy(**wrong)


def test_planning_8k_tokens_is_vectorised_over_rows():
    rng = np.random.default_rng(0)
    scores = rng.exponential(size=8192).astype(np.float32)
    errors = rng.uniform(0.05, 0.2, 8192).astype(np.float32)
    lengths = np.full(256, 32)
    shares = scores / scores.sum()

    def plan():
        assign_formats(PrecisionPolicy(), shares, errors, lengths, tokens=8192)

    assert count_calls(plan) < 100 + 3 * len(lengths)  # a few for each block, none for each row
