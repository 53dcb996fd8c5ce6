"""Rows through payloads: gathered, encoded, restored elsewhere, for every format."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchkv_kernels import (
    Payload,
    PayloadError,
    Rope,
    RopeLayout,
    dequantize_scatter,
    quantize_gather,
)
from patchkv_kernels import PayloadFormat as Format

QUANTISED = (Format.K8V8, Format.K8V4, Format.K4V4)
ERRORS = {
    Format.NATIVE: (1e-6, 0.0),
    Format.F16: (4e-4, 4e-4),
    Format.K8V8: (8e-3, 8e-3),
    Format.K8V4: (8e-3, 0.13),
    Format.K4V4: (0.13, 0.13),
}
"""Largest relative errors of keys and of values, for normally distributed rows."""
LAYERS = 3


def rope_of(head_dim, *, rotary=1.0, layout=RopeLayout.HALF_SPLIT):
    pairs = max(1, int(head_dim * rotary) // 2)
    inv_freq = (10000.0 ** (-np.arange(pairs) / pairs)).astype(np.float32)
    return Rope(inv_freq, layout)


def rows_of(kv_heads=3, capacity=120, head_dim=64, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, kv_heads, capacity, head_dim)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]


def turned(keys, rope, written, wanted):
    """Keys moved from positions to positions: complex numbers in float64, angle by angle."""
    pairs = rope.inv_freq.shape[-1]
    angles = [np.float32(p) * rope.inv_freq for p in (written[:, None], wanted[:, None])]
    turn = torch.from_numpy(np.exp(1j * (angles[1].astype(np.float64) - angles[0])))
    rotary = keys[..., : 2 * pairs].double()
    if rope.layout is RopeLayout.HALF_SPLIT:
        first, second = rotary.chunk(2, dim=-1)
    else:
        first, second = rotary[..., 0::2], rotary[..., 1::2]
    moved = torch.complex(first, second) * turn
    out = keys.double().clone()
    if rope.layout is RopeLayout.HALF_SPLIT:
        out[..., : 2 * pairs] = torch.cat([moved.real, moved.imag], dim=-1)
    else:
        out[..., 0 : 2 * pairs : 2], out[..., 1 : 2 * pairs : 2] = moved.real, moved.imag
    return out


def relative(actual, expected):
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    return float(error)


@pytest.mark.parametrize("format", Format, ids=lambda f: f.value)
@given(
    kv_heads=st.sampled_from([1, 3, 9]),
    head_dim=st.sampled_from([8, 64, 80, 96, 128]),
    lengths=st.lists(st.sampled_from([1, 3, 31, 32, 33]), min_size=1, max_size=3),
    rotary=st.sampled_from([0.5, 1.0]),
    layout=st.sampled_from(list(RopeLayout)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scattered=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rows_come_back_moved_and_no_others_are_written(
    format, kv_heads, head_dim, lengths, rotary, layout, dtype, scattered, seed
):
    """Blocks from anywhere, into consecutive or scattered rows of a poisoned, strided cache."""
    rng = np.random.default_rng(seed)
    rope = rope_of(head_dim, rotary=rotary, layout=layout)
    keys, values = rows_of(kv_heads, 120, head_dim, dtype, seed)
    before = keys.clone(), values.clone()
    starts = np.cumsum([0, *lengths[:-1]]) + 2
    ranges = [
        (int(start), int(start + length), int(start) + int(rng.integers(0, 4000)))
        for start, length in zip(starts, lengths, strict=True)
    ]
    payload = quantize_gather(keys, values, ranges, format=format, rope=rope)
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])

    rows = np.arange(payload.rows)
    slots = rng.permutation(200)[: payload.rows] if scattered else rows + 7
    written = payload.row_positions()
    wanted = written + rng.integers(-2, 3) * 11 if not scattered else rng.permutation(payload.rows)
    wanted = np.maximum(wanted, 0)
    # A cache whose heads lie behind its rows: nothing about its strides is to be relied on.
    caches = [
        torch.full((LAYERS, 200, kv_heads, head_dim), torch.nan, dtype=dtype).transpose(1, 2)
        for _ in range(2)
    ]
    stored = {name: tensor.clone() for name, tensor in payload.tensors.items()}
    dequantize_scatter(payload, rows, slots, wanted, *caches, rope=rope)

    for name, tensor in payload.tensors.items():
        assert torch.equal(tensor, stored[name]), f"{name} changed"
    others = np.setdiff1d(np.arange(200), slots)
    source = np.concatenate([np.arange(start, stop) for start, stop, _ in ranges])
    expected = turned(keys[:, :, source], rope, written, wanted), values[:, :, source]
    resolution = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11 if dtype != torch.float32 else 0
    for cache, exact, bound in zip(caches, expected, ERRORS[format], strict=True):
        assert cache[:, :, others].isnan().all()
        # Single rows vary: a bound on all rows together, with room where there are few.
        slack = 2 if payload.rows * kv_heads * head_dim < 2000 else 1
        assert relative(cache[:, :, slots], exact) <= bound * slack + resolution


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_native_keeps_every_bit(dtype):
    keys, values = rows_of(dtype=dtype)
    keys[0, 0, 5, :3] = torch.tensor([torch.nan, -0.0, torch.inf])
    rope = rope_of(64)
    payload = quantize_gather(keys, values, [(0, 33, 0)], format=Format.NATIVE, rope=rope)
    out = torch.zeros_like(keys), torch.zeros_like(values)
    rows = np.arange(33)
    dequantize_scatter(payload, rows, rows, rows, *out, rope=rope)
    for actual, exact in zip(out, (keys, values), strict=True):
        size = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(actual[:, :, :33].view(size), exact[:, :, :33].view(size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_f16_of_a_16_bit_model_keeps_every_bit(dtype):
    keys, values = rows_of(dtype=dtype)
    payload = quantize_gather(keys, values, [(3, 36, 3)], format=Format.F16, rope=rope_of(64))
    assert payload.keys.dtype == payload.values.dtype == dtype
    assert torch.equal(payload.keys, keys[:, :, 3:36])
    assert torch.equal(payload.values, values[:, :, 3:36])


def test_f16_of_a_float32_model_falls_back_where_float16_overflows():
    keys, values = rows_of()
    values[1, 2, 10, 5] = 1e6
    values[1, 2, 11, 5] = torch.inf  # float16 has that
    payload = quantize_gather(keys, values, [(0, 32, 0)], format=Format.F16, rope=rope_of(64))
    assert payload.keys.dtype == torch.float16
    assert payload.values.dtype == torch.bfloat16
    assert payload.values[1, 2, 10, 5].isfinite() and payload.values[1, 2, 11, 5].isinf()


@pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.value)
def test_a_native_payload_is_encoded_like_the_cache_it_came_from(format):
    """Rows stored in haste are quantised at the next suspend, from their write positions."""
    keys, values = rows_of()
    rope = rope_of(64)
    ranges = [(4, 36, 4), (50, 63, 50)]
    direct = quantize_gather(keys, values, ranges, format=format, rope=rope)
    native = quantize_gather(keys, values, ranges, format=Format.NATIVE, rope=rope)
    rows, written = native.block_rows, native.positions
    again = [(int(rows[i]), int(rows[i + 1]), int(written[i])) for i in range(2)]
    later = quantize_gather(native.keys, native.values, again, format=format, rope=rope)
    for name, tensor in direct.tensors.items():
        assert torch.equal(tensor, later.tensors[name]), name
    assert np.array_equal(direct.positions, later.positions)


def test_given_key_channels_are_used_and_shared():
    keys, values = rows_of()
    rope, ranges = rope_of(64), [(0, 32, 0)]
    first = quantize_gather(keys, values, ranges, format=Format.K8V8, rope=rope)
    again = quantize_gather(
        keys, values, ranges, format=Format.K8V4, rope=rope, channels=first.key_channels
    )
    assert again.key_channels is first.key_channels
    assert torch.equal(again.keys, first.keys) and torch.equal(again.key_scales, first.key_scales)


@pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.value)
def test_restoring_twice_gives_the_same_bits(format):
    """Quantised rows that move forth and back are rotated from storage each time."""
    keys, values = rows_of()
    rope, rows = rope_of(64), np.arange(64)
    payload = quantize_gather(keys, values, [(0, 64, 0)], format=format, rope=rope)
    once, twice = [torch.zeros_like(keys) for _ in range(2)], [keys * 0 for _ in range(2)]
    dequantize_scatter(payload, rows, rows, rows, *once, rope=rope)
    dequantize_scatter(payload, rows, rows, rows + 50, *twice, rope=rope)
    dequantize_scatter(payload, rows, rows, rows, *twice, rope=rope)
    assert torch.equal(once[0], twice[0]) and torch.equal(once[1], twice[1])


@pytest.mark.parametrize("format", Format, ids=lambda f: f.value)
def test_layers_can_be_restored_one_by_one(format):
    keys, values = rows_of()
    rope, rows = rope_of(64), np.arange(40)
    payload = quantize_gather(keys, values, [(0, 40, 0)], format=format, rope=rope)
    whole, parts = [torch.zeros_like(keys) for _ in range(2)], [keys * 0 for _ in range(2)]
    dequantize_scatter(payload, rows, rows, rows + 9, *whole, rope=rope)
    for layer in range(LAYERS):
        one = range(layer, layer + 1)
        dequantize_scatter(payload, rows, rows, rows + 9, *parts, rope=rope, layers=one)
        assert not parts[0][layer + 1 :].any()
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


@pytest.mark.parametrize("format", Format, ids=lambda f: f.value)
def test_long_runs_are_restored_like_short_ones(format):
    """The CPU path takes long runs in steps; the borders of the steps must not show."""
    keys, values = rows_of(kv_heads=9, capacity=1100, head_dim=128)
    rope, rows = rope_of(128), np.arange(1100)
    payload = quantize_gather(keys, values, [(0, 1100, 0)], format=format, rope=rope)
    whole, parts = [torch.zeros_like(keys) for _ in range(2)], [keys * 0 for _ in range(2)]
    dequantize_scatter(payload, rows, rows, rows + 3, *whole, rope=rope)
    for part in np.array_split(rows, 7):
        dequantize_scatter(payload, part, part, part + 3, *parts, rope=rope)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


def test_bytes_of_16_bits_at_common_head_sizes():
    """What the formats promise, tables and channels counted, for a context of 1,500 rows."""
    for head_dim, largest in ((64, (0.527, 0.395)), (128, (0.520, 0.391))):
        keys, values = rows_of(kv_heads=2, capacity=1500, head_dim=head_dim, dtype=torch.bfloat16)
        ranges = [(start, min(start + 32, 1500), start) for start in range(0, 1500, 32)]
        for format, ratio in zip((Format.K8V8, Format.K8V4), largest, strict=True):
            payload = quantize_gather(keys, values, ranges, format=format, rope=rope_of(head_dim))
            assert payload.nbytes / (keys.nbytes + values.nbytes) < ratio


def test_what_cannot_be_stored_is_refused():
    keys, values = rows_of(capacity=10)
    rope = rope_of(64)

    def store(*ranges, keys=keys, values=values, format=Format.K8V4):
        return quantize_gather(keys, values, ranges, format=format, rope=rope)

    for bad in [(0, 11, 0)], [(3, 3, 0)], [(-1, 2, 0)], [(0, 2, -1)], []:
        with pytest.raises(PayloadError, match="range"):
            store(*bad)
    with pytest.raises(PayloadError, match="must both be"):
        store((0, 2, 0), values=values[:, :, :5])
    narrow = [tensor[..., :12].contiguous() for tensor in (keys, values)]
    with pytest.raises(PayloadError, match="multiple of 8"):
        store((0, 2, 0), keys=narrow[0], values=narrow[1])


def test_restores_that_do_not_fit_are_refused_before_anything_is_written():
    keys, values = rows_of(capacity=10)
    rope = rope_of(64)
    payload = quantize_gather(keys, values, [(0, 10, 0)], format=Format.K8V4, rope=rope)
    rows = np.arange(10)
    cache = [torch.zeros(LAYERS, 3, 12, 64) for _ in range(2)]
    for wrong in (rows + 1, rows - 1):
        with pytest.raises(PayloadError, match="rows must lie"):
            dequantize_scatter(payload, wrong, rows, rows, *cache, rope=rope)
    with pytest.raises(PayloadError, match="behind the cache"):
        dequantize_scatter(payload, rows, rows + 3, rows, *cache, rope=rope)
    other = [torch.zeros(LAYERS, 2, 12, 64) for _ in range(2)]
    with pytest.raises(PayloadError, match="kv heads"):
        dequantize_scatter(payload, rows, rows, rows, *other, rope=rope)
    assert not any(tensor.any() for tensor in (*cache, *other))


def test_a_payload_tells_when_its_tables_do_not_fit():
    keys, values = rows_of(capacity=4)
    table, positions = np.array([0, 4]), np.array([0])
    Payload(Format.NATIVE, keys, values, table, positions)
    with pytest.raises(PayloadError, match="same rows"):
        Payload(Format.NATIVE, keys, values[:, :, :3], table, positions)
    with pytest.raises(PayloadError, match="describe the rows"):
        Payload(Format.NATIVE, keys, values, np.array([0, 3]), positions)
