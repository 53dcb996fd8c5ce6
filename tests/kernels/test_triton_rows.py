"""The Triton kernels that store and restore rows, in the interpreter, against the torch paths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patchkv_kernels import PayloadError, PayloadFormat, Rope, RopeLayout, RowMoves
from patchkv_kernels.gather import gather_rows_torch, quantize_gather
from patchkv_kernels.row_moves import rotation_table
from patchkv_kernels.scatter import scatter_rows_cpu

pytest.importorskip("triton")

from patchkv_kernels.triton_dequantize import scatter_rows_triton  # noqa: E402
from patchkv_kernels.triton_quantize import gather_rows_triton  # noqa: E402
from patchkv_kernels.triton_rows import head_groups  # noqa: E402
from tests.kernels.traffic import counted  # noqa: E402

# NumPy, in which the interpreter computes, warns of infinities and NaN; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

CPU = torch.device("cpu")
QUANTISED = [format for format in PayloadFormat if format.is_quantised]
HALF_SPLIT, INTERLEAVED = RopeLayout
FORMS = [  # rows, kv heads, head_dim, rotary_dim, layout, dtype
    (97, 1, 64, 64, HALF_SPLIT, torch.float32),
    (33, 3, 24, 24, HALF_SPLIT, torch.bfloat16),
    (3, 9, 8, 8, INTERLEAVED, torch.float16),
    (97, 1, 80, 40, HALF_SPLIT, torch.float16),
    (97, 3, 48, 16, INTERLEAVED, torch.float32),
    (33, 1, 128, 64, INTERLEAVED, torch.bfloat16),
]
# Each format with half of the forms; the others are left to the slow tests.
PAIRS = [
    pytest.param(format, form, marks=pytest.mark.slow if (i + j) % 2 else ())
    for i, format in enumerate(PayloadFormat)
    for j, form in enumerate(FORMS)
]
# The interpreter cuts float32 to bfloat16 where a GPU rounds: one step of 2^-8 more.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 2**-7}


def cache_of(form, capacity, *, layers=2, seed=0):
    """Keys and values with channels of different size, `[layers, kv_heads, capacity, dim]`."""
    _, kv_heads, head_dim, _, _, dtype = form
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(head_dim, generator=generator).exp()
    keys = torch.randn(layers, kv_heads, capacity, head_dim, generator=generator) * spread + spread
    values = torch.randn(layers, kv_heads, capacity, head_dim, generator=generator)
    return keys.to(dtype), values.to(dtype)


def rope_of(form):
    *_, rotary_dim, layout, _ = form
    exponents = np.arange(rotary_dim // 2) / (rotary_dim // 2)
    return Rope((1e4**-exponents).astype(np.float32), layout)


def payload_of(form, format):
    """Blocks of 32 rows and an odd one at the end, from all over a cache of twice as many rows."""
    rows = form[0]
    keys, values = cache_of(form, 2 * rows)
    ranges = [
        (2 * start, 2 * start + min(32, rows - start), 3 * start) for start in range(0, rows, 32)
    ]
    return quantize_gather(keys, values, ranges, format=format, rope=rope_of(form))


def moves_of(payload, form, *, shift):
    """Every other run of 21 rows, so that tiles and blocks never meet, to shuffled slots.

    Every fifth row keeps its position.
    """
    rows = np.flatnonzero(np.arange(payload.rows) // 21 % 2 == 0)
    slots = np.random.default_rng(1).permutation(2 * payload.rows)[: len(rows)]
    positions = payload.row_positions()[rows] + np.where(rows % 5 == 0, 0, shift)
    return RowMoves.prepare(payload, rows, slots, positions, rope=rope_of(form), device=CPU)


def poisoned(form, capacity, *, layers=2):
    _, kv_heads, head_dim, _, _, dtype = form
    shape = (layers, kv_heads, capacity, head_dim)
    return [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def relative_rms(actual, expected):
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt())


@pytest.mark.parametrize(("format", "form"), PAIRS, ids=str)
def test_scatter_writes_the_same_rows_as_the_cpu_path(format, form):
    payload = payload_of(form, format)
    moves = moves_of(payload, form, shift=1000)
    keys, values = poisoned(form, 2 * payload.rows)
    expected_keys, expected_values = poisoned(form, 2 * payload.rows)
    scatter_rows_triton(payload, moves, keys, values)
    scatter_rows_cpu(payload, moves, expected_keys, expected_values)
    assert torch.equal(keys.isnan(), expected_keys.isnan())
    assert torch.equal(values.isnan(), expected_values.isnan())
    tolerance = TOLERANCE[form[-1]]
    for actual, expected in ((keys, expected_keys), (values, expected_values)):
        actual, expected = (tensor[:, :, moves.slots] for tensor in (actual, expected))
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=4 * tolerance)
        assert relative_rms(actual, expected) < tolerance


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_unmoved_rows_keep_their_bits(form):
    """Also the sign of a zero and the payload of a NaN, which a turn by 0 would change."""
    payload = payload_of(form, PayloadFormat.NATIVE)
    with torch.inference_mode():
        payload.keys[:, :, 0, ::2] = -0.0
        payload.keys[:, :, 0, 1] = torch.nan
        payload.keys[:, :, 0, 3] = torch.inf
    for shift in (0, 7):  # alone, and beside rows that move
        moves = moves_of(payload, form, shift=shift)
        assert (moves.cos is None) == (shift == 0)
        keys, values = poisoned(form, 2 * payload.rows)
        scatter_rows_triton(payload, moves, keys, values)
        unmoved = (moves.rows % 5 == 0) | (shift == 0)
        rows, slots = moves.rows[unmoved], moves.slots[unmoved]
        assert torch.equal(bits(keys[:, :, slots]), bits(payload.keys[:, :, rows]))
        assert torch.equal(bits(values[:, :, slots]), bits(payload.values[:, :, rows]))


@pytest.mark.parametrize(("format", "form"), PAIRS, ids=str)
def test_gather_leaves_the_same_bytes_as_torch(format, form):
    """Rows of all sizes, with zeros, subnormal, huge and non-finite ones among them."""
    keys, values = cache_of(form, 60, seed=3)
    for tensor in (keys, values):
        tensor[:, :, 7] = 0.0
        tensor[:, :, 8] *= 1e-7
        tensor[:, :, 9] *= 3e4
        tensor[0, 0, 10, 1] = torch.nan
        tensor[1, 0, 11, 2] = -torch.inf
        tensor[:, :, 12] = -0.0
    rows = torch.arange(5, 55)
    rotation = rotation_table(rope_of(form), np.arange(105, 155), np.zeros(50, np.int64), CPU)
    channels = torch.stack([keys[:, :, 20].half(), keys[:, :, 21].half().abs() + 0.5], dim=2)
    options = {
        "format": format,
        "float_dtypes": (torch.float16, torch.float16)
        if format is PayloadFormat.F16
        else (keys.dtype, values.dtype),
        "rotation": rotation if format.is_quantised else None,
        "layout": form[4],
        "key_channels": channels if format.is_quantised else None,
    }
    before = bits(keys), bits(values)
    expected = gather_rows_torch(keys, values, rows, **options)
    actual = gather_rows_triton(keys, values, rows, **options)
    assert torch.equal(bits(keys), before[0]) and torch.equal(bits(values), before[1])
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and actual[name].shape == tensor.shape
        different = (bits(actual[name]) != bits(tensor)).float().mean()
        # Products that torch may fuse and the kernel does not can tip a key on a rounding border.
        assert different <= (0.001 if name in ("keys", "key_scales") else 0.0), name


def _paged(kv_heads, head_dim, dtype, pages, page, *, heads_first):
    """A paged cache, and its view `[1, kv_heads, rows, head_dim]` in which a slot is one row."""
    if heads_first:  # [pages, kv_heads, page, dim]: the rows of a head are not evenly spaced
        cache = torch.full((pages, kv_heads, page, head_dim), torch.nan, dtype=dtype)
        rows = pages * kv_heads * page - (kv_heads - 1) * page
        view = cache.as_strided((1, kv_heads, rows, head_dim), (0, page * head_dim, head_dim, 1))
        return (
            cache,
            view,
            lambda token, table: table[token // page] * kv_heads * page + (token % page),
        )
    cache = torch.full((pages, page, kv_heads, head_dim), torch.nan, dtype=dtype)
    view = cache.view(1, pages * page, kv_heads, head_dim).transpose(1, 2)
    return cache, view, lambda token, table: table[token // page] * page + token % page


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("format", [PayloadFormat.NATIVE, PayloadFormat.K8V4])
def test_scatter_into_pages(format, heads_first):
    """Pages of 16 tokens in any order, by slot mapping and strides; both usual layouts."""
    form = (70, 3, 64, 64, HALF_SPLIT, torch.float32)
    payload = quantize_gather(
        *cache_of(form, 70, layers=1), [(0, 32, 0), (32, 70, 40)], format=format, rope=rope_of(form)
    )
    token = np.arange(70)
    table = np.random.default_rng(2).permutation(9)[:5]
    (key_pages, keys, slot_of), (value_pages, values, _) = (
        _paged(3, 64, torch.float32, 9, 16, heads_first=heads_first) for _ in range(2)
    )
    prepare = {"rope": rope_of(form), "device": CPU}
    moves = RowMoves.prepare(payload, token, slot_of(token, table), token + 100, **prepare)
    scatter_rows_triton(payload, moves, keys, values)
    dense = poisoned(form, 70, layers=1)
    scatter_rows_cpu(
        payload, RowMoves.prepare(payload, token, token, token + 100, **prepare), *dense
    )
    for pages, expected in ((key_pages, dense[0]), (value_pages, dense[1])):
        by_token = pages.transpose(1, 2) if heads_first else pages  # [pages, page, heads, dim]
        actual = by_token[torch.from_numpy(table)].flatten(0, 1)[:70].transpose(0, 1)
        torch.testing.assert_close(actual, expected[0], rtol=1e-5, atol=1e-5)
        assert int((~pages.isnan()).sum()) == expected.numel()


@pytest.mark.parametrize("format", PayloadFormat, ids=lambda format: format.value)
@pytest.mark.parametrize("form", [FORMS[0], FORMS[4]], ids=str)
def test_scatter_reads_the_payload_once_and_writes_rows_once(form, format):
    payload = payload_of(form, format)
    moves = moves_of(payload, form, shift=9)
    keys, values = poisoned(form, 2 * payload.rows)
    with counted() as traffic:
        scatter_rows_triton(payload, moves, keys, values)
    chosen = torch.zeros(payload.rows, dtype=torch.int64)
    chosen[moves.rows] = 1
    for name, tensor in payload.tensors.items():
        counts = torch.from_numpy(traffic.loaded(tensor)).view(tensor.shape)
        if name == "key_channels":  # once by each tile of rows
            assert counts.unique().tolist() == [-(-len(moves.rows) // 32)]
        else:
            rows = chosen.view(-1, *[1] * (tensor.ndim - 3))
            assert torch.equal(counts, rows.expand(tensor.shape))
        assert not traffic.stored(tensor).any()
    written = torch.zeros(2 * payload.rows, dtype=torch.int64)
    written[moves.slots] = 1
    for tensor in (keys, values):
        counts = torch.from_numpy(traffic.stored(tensor)).view(tensor.shape)
        assert torch.equal(counts, written[:, None].expand(tensor.shape))
        assert not traffic.loaded(tensor).any()
    # Heads are shared out over programs here; each reads the rotation once for all its heads.
    groups, _ = head_groups(form[1], -(-len(moves.rows) // 32) * payload.layers)
    for table in (moves.cos, moves.sin):
        assert (traffic.loaded(table) == payload.layers * groups).all()


@pytest.mark.parametrize("format", QUANTISED, ids=lambda format: format.value)
def test_gather_reads_rows_once_and_writes_the_payload_once(format):
    form = FORMS[4]
    keys, values = cache_of(form, 80)
    rows = torch.arange(3, 71)
    rotation = rotation_table(rope_of(form), np.arange(68), np.zeros(68, np.int64), CPU)
    with counted() as traffic:
        encoded = gather_rows_triton(
            keys,
            values,
            rows,
            format=format,
            float_dtypes=(keys.dtype, values.dtype),
            rotation=rotation,
            layout=form[4],
            key_channels=torch.ones(2, 3, 2, 48, dtype=torch.float16),
        )
    read = torch.zeros(80, dtype=torch.int64)
    read[rows] = 1
    for tensor in (keys, values):
        counts = torch.from_numpy(traffic.loaded(tensor)).view(tensor.shape)
        assert torch.equal(counts, read[:, None].expand(tensor.shape))
        assert not traffic.stored(tensor).any()
    for tensor in encoded.values():
        assert (traffic.stored(tensor) == 1).all()


def test_scatter_refuses_a_payload_elsewhere():
    form = FORMS[0]
    payload = payload_of(form, PayloadFormat.NATIVE)
    moves = moves_of(payload, form, shift=0)
    keys = torch.empty(2, 1, 194, 64, device="meta")
    with pytest.raises(PayloadError, match="copy the payload"):
        scatter_rows_triton(payload, moves, keys, keys)
