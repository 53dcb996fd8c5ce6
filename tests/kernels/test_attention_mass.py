"""Attention mass against a loop in float64, and the kernels against the same."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from patchkv_kernels.attention_mass import add_block_mass, add_received_mass
from patchkv_kernels.errors import PayloadError

if importlib.util.find_spec("triton"):
    from patchkv_kernels.triton_attention_mass import (
        TOKENS_PER_SPLIT,
        add_block_mass_triton,
        add_received_mass_triton,
    )

    RECEIVED = {"torch": add_received_mass, "triton": add_received_mass_triton}
    BLOCKS = {"torch": add_block_mass, "triton": add_block_mass_triton}
else:
    RECEIVED, BLOCKS = {"torch": add_received_mass}, {"torch": add_block_mass}

# Triton 3.9's interpreter multiplies bfloat16 as integers: only the device check covers it.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
SHAPES = [  # heads, kv heads, rows, tokens, head_dim
    (4, 4, 1, 1, 8),
    (9, 3, 1, 97, 64),
    (3, 1, 33, 33, 24),
    (4, 1, 3, 423, 80),
    (9, 3, 40, 97, 16),
]


def inputs(heads, kv_heads, rows, tokens, head_dim, dtype):
    generator = torch.Generator().manual_seed(tokens + rows)
    # As in a model: heads come from a transposed view, keys are the start of a longer cache.
    query = torch.randn(rows, heads, head_dim, generator=generator).transpose(0, 1)
    key = torch.randn(kv_heads, tokens + 7, head_dim, generator=generator)[:, :tokens]
    return (query * 2).to(dtype), key.to(dtype)


def weights_of(query, key, scaling):
    """Softmax row by row, float64 `[rows, tokens]`, summed over heads."""
    heads, rows, head_dim = query.shape
    kv_heads, tokens, _ = key.shape
    total = torch.zeros(rows, tokens, dtype=torch.float64)
    for head in range(heads):
        for row in range(rows):
            seen = key[head * kv_heads // heads, : tokens - rows + row + 1].double()
            scores = seen @ query[head, row].double() * (scaling or head_dim**-0.5)
            total[row, : len(seen)] += scores.softmax(dim=0)
    return total


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("implementation", RECEIVED)
def test_received_mass_is_the_sum_of_softmax_rows(implementation, shape, dtype):
    scaling = None if shape[-1] > 16 else 0.3
    query, key = inputs(*shape, dtype)
    heads, _, rows, tokens, _ = shape
    mass = torch.full((tokens + 5,), 0.5)
    RECEIVED[implementation](mass, query, key, scaling=scaling)
    expected = weights_of(query, key, scaling).sum(dim=0) + 0.5
    torch.testing.assert_close(
        mass[:tokens].double(), expected, atol=rows * TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert (mass[tokens:] == 0.5).all()
    assert mass[:tokens].sum() - 0.5 * tokens == pytest.approx(heads * rows, rel=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("implementation", BLOCKS)
def test_block_mass_pools_both_sides(implementation, shape, dtype):
    block_size = 64 if shape[-1] > 24 else 32
    query, key = inputs(*shape, dtype)
    _, _, rows, tokens, _ = shape
    blocks = -(-tokens // block_size)
    mass = torch.full((blocks + 1, blocks + 2), 0.25)
    BLOCKS[implementation](mass, query, key, block_size=block_size)
    weights = weights_of(query, key, None)
    expected = torch.full(mass.shape, 0.25, dtype=torch.float64)
    for row in range(rows):
        for token in range(tokens):
            expected[(tokens - rows + row) // block_size, token // block_size] += weights[
                row, token
            ]
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(mass.double(), expected, atol=rows * tolerance, rtol=tolerance)


@pytest.mark.parametrize("first", [0, 3, 8, 96])
def test_sampled_rows_are_those_of_their_positions(first):
    """One row in eight, counted from token 0 whatever row a call begins with."""
    query, key = inputs(4, 2, 99 - first, 99, 16, torch.float32)
    mass = torch.zeros(4, 4)
    add_block_mass(mass, query, key, block_size=32, row_stride=8)
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for row, weights in enumerate(weights_of(query, key, None), start=first):
        if row % 8 == 7:
            for token, weight in enumerate(weights):
                expected[row // 32, token // 32] += weight
    torch.testing.assert_close(mass.double(), expected, atol=1e-4, rtol=1e-5)
    assert bool(mass.any()) is (first < 96)


@pytest.mark.parametrize("implementation", RECEIVED)
def test_chunks_add_up_to_one_call(implementation):
    """A prefill in chunks, and a layer more, give the same map and the same mass as one call."""
    query, key = inputs(4, 2, 96, 96, 16, torch.float32)
    whole, parts = torch.zeros(96), torch.zeros(96)
    whole_map, parts_map = torch.zeros(3, 3), torch.zeros(3, 3)
    RECEIVED[implementation](whole, query, key)
    BLOCKS[implementation](whole_map, query, key, block_size=32)
    for start, stop in ((0, 33), (33, 50), (50, 96)):
        RECEIVED[implementation](parts, query[:, start:stop], key[:, :stop])
        BLOCKS[implementation](parts_map, query[:, start:stop], key[:, :stop], block_size=32)
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(parts_map, whole_map, atol=1e-4, rtol=1e-5)
    assert (whole_map.triu(1) == 0).all()


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # the log of an empty sum
@pytest.mark.skipif("triton" not in RECEIVED, reason="triton is not installed")
def test_kernels_merge_several_splits_of_the_keys():
    """More keys than one program of the first pass takes, some of them unseen by some rows."""
    tokens = TOKENS_PER_SPLIT + 40
    query, key = inputs(2, 1, 64, tokens, 16, torch.float32)
    mass, expected = torch.zeros(tokens), torch.zeros(tokens)
    add_received_mass_triton(mass, query, key)
    add_received_mass(expected, query, key)
    torch.testing.assert_close(mass, expected, atol=1e-5, rtol=1e-5)


def test_wrong_shapes_are_refused():
    query, key = inputs(4, 2, 3, 33, 16, torch.float32)
    with pytest.raises(PayloadError, match="do not fit"):
        add_received_mass(torch.zeros(33), query[:3], key)
    with pytest.raises(PayloadError, match="do not fit"):
        add_received_mass(torch.zeros(33), query, key[:, :2])
    with pytest.raises(PayloadError, match="at least 33 entries"):
        add_received_mass(torch.zeros(32), query, key)
    with pytest.raises(PayloadError, match="at least 2 blocks"):
        add_block_mass(torch.zeros(1, 2), query, key, block_size=32)
