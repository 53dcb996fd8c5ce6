# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
"""Triton kernels for attention mass; see `attention_mass` for what they compute.

Two passes over the keys, as in the backward pass of FlashAttention-2 (arXiv 2307.08691, section
3.1): the first leaves the log-sum-exp of every softmax row, the second makes each probability again
and adds it up where it belongs. The `[rows, tokens]` weights never reach memory. Every entry of the
sum is written by one program only, so results do not depend on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TOKENS_PER_SPLIT = 1024
"""Keys per program of the first pass: few rows must still fill a GPU."""
KEYS = 64
"""Keys per tile."""
MAX_ROWS = 32
"""Largest number of query rows per tile."""
OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
"""Compiler options; the tests check for spilled registers with the same ones."""
UNSPECIALISED = ["rows", "tokens", "tokens_per_split", "kv_heads", "heads"]
"""Arguments that change from call to call: a new value must not cause a recompilation."""


@triton.jit
def _scores(
    query, q_places, q_valid, q_stride_dim, key, k_places, k_valid, k_stride_dim,
    positions, keys, factor, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Scaled scores `[rows, keys]`; minus infinity where a key lies behind the row.

    Heads are multiplied `DIMS` channels at a time, which keeps all tiles in registers. Products of
    float32 are taken as three of TF32 (16-bit inputs are exact in float32 anyway).
    """
    scores = tl.zeros([q_places.shape[0], k_places.shape[0]], tl.float32)
    for start in range(0, HEAD_DIM, DIMS):
        dims = start + tl.arange(0, DIMS)
        real = dims < HEAD_DIM
        q = tl.load(
            query + q_places[:, None] + (dims * q_stride_dim)[None, :],
            mask=q_valid[:, None] & real[None, :],
            other=0.0,
        )
        k = tl.load(
            key + k_places[None, :] + (dims * k_stride_dim)[:, None],
            mask=real[:, None] & k_valid[None, :],
            other=0.0,
        )
        scores = tl.dot(q, k, scores, input_precision="tf32x3")
    return tl.where(keys[None, :] <= positions[:, None], scores * factor, float("-inf"))


@triton.jit(do_not_specialize=UNSPECIALISED)
def row_lse_kernel(
    query, key, lse, rows, tokens, tokens_per_split, factor,
    q_stride_head, q_stride_row, q_stride_dim, k_stride_head, k_stride_row, k_stride_dim,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """First pass: log-sum-exp of each row over one split of the keys, `[splits, heads * rows]`.

    Grid: (tiles of the rows of a group, counted head by head; kv heads; splits).
    """
    kv_head, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    offsets = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = offsets < GROUP * rows
    q_places = offsets // rows * q_stride_head + offsets % rows * q_stride_row
    positions = tokens - rows + offsets % rows
    tile = tl.arange(0, KEYS)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    stop = tl.minimum(tokens, (split + 1) * tokens_per_split)
    for start in range(split * tokens_per_split, stop, KEYS):
        scores = _scores(
            query + kv_head * GROUP * q_stride_head, q_places, valid, q_stride_dim,
            key + kv_head * k_stride_head + tl.cast(start, tl.int64) * k_stride_row,
            tile * k_stride_row, start + tile < tokens, k_stride_dim,
            positions, start + tile, factor, HEAD_DIM, DIMS,
        )  # fmt: skip
        top = tl.maximum(highest, tl.max(scores, axis=1))
        # A row that has seen no key yet stays at minus infinity, without inf - inf on the way.
        shift = tl.where(top == float("-inf"), 0.0, top)
        total = total * tl.exp(highest - shift) + tl.sum(tl.exp(scores - shift[:, None]), axis=1)
        highest = top
    place = (split * tl.num_programs(1) + kv_head) * GROUP * rows
    tl.store(lse + place + offsets, highest + tl.log(total), mask=valid)


@triton.jit(do_not_specialize=UNSPECIALISED)
def received_mass_kernel(
    mass, query, key, lse, rows, tokens, kv_heads, factor,
    q_stride_head, q_stride_row, q_stride_dim, k_stride_head, k_stride_row, k_stride_dim,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Second pass for the mass per token: grid (tiles of keys,), all heads and rows in each."""
    tile = tl.arange(0, KEYS)
    keys = tl.program_id(0) * KEYS + tile
    known = keys < tokens
    received = tl.zeros([KEYS], tl.float32)
    key += tl.program_id(0).to(tl.int64) * KEYS * k_stride_row
    for kv_head in range(kv_heads):
        head = tl.cast(kv_head, tl.int64)
        for first in range(0, GROUP * rows, ROWS):
            offsets = first + tl.arange(0, ROWS)
            valid = offsets < GROUP * rows
            scores = _scores(
                query + head * GROUP * q_stride_head,
                offsets // rows * q_stride_head + offsets % rows * q_stride_row,
                valid, q_stride_dim,
                key + head * k_stride_head, tile * k_stride_row, known, k_stride_dim,
                tokens - rows + offsets % rows, keys, factor, HEAD_DIM, DIMS,
            )  # fmt: skip
            row_lse = tl.load(lse + head * GROUP * rows + offsets, mask=valid, other=0.0)
            weights = tl.where(valid[:, None], tl.exp(scores - row_lse[:, None]), 0.0)
            received += tl.sum(weights, axis=0)
    tl.store(mass + keys, tl.load(mass + keys, mask=known, other=0.0) + received, mask=known)


@triton.jit(do_not_specialize=UNSPECIALISED)
def block_mass_kernel(
    mass, query, key, lse, rows, tokens, heads, factor, mass_stride_row, mass_stride_column,
    q_stride_head, q_stride_row, q_stride_dim, k_stride_head, k_stride_row, k_stride_dim,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Second pass for the map: grid (query blocks that have rows, tiles of keys)."""
    first = tokens - rows
    block = first // BLOCK + tl.program_id(0)
    positions = block * BLOCK + tl.arange(0, BLOCK)
    valid = (positions >= first) & (positions < tokens)
    start = tl.program_id(1) * KEYS
    tile = tl.arange(0, KEYS)
    if start < (block + 1) * BLOCK:  # a later tile is seen by no row
        weights = tl.zeros([BLOCK, KEYS], tl.float32)
        for index in range(heads):
            head = tl.cast(index, tl.int64)
            scores = _scores(
                query + head * q_stride_head, (positions - first) * q_stride_row,
                valid, q_stride_dim,
                key + head // GROUP * k_stride_head + start.to(tl.int64) * k_stride_row,
                tile * k_stride_row, start + tile < tokens, k_stride_dim,
                positions, start + tile, factor, HEAD_DIM, DIMS,
            )  # fmt: skip
            row_lse = tl.load(lse + head * rows + positions - first, mask=valid, other=0.0)
            weights += tl.where(valid[:, None], tl.exp(scores - row_lse[:, None]), 0.0)
        received = tl.sum(tl.reshape(tl.sum(weights, axis=0), [KEYS // BLOCK, BLOCK]), axis=1)
        columns = start // BLOCK + tl.arange(0, KEYS // BLOCK)
        places = mass + block.to(tl.int64) * mass_stride_row + columns * mass_stride_column
        known = columns * BLOCK < tokens
        tl.store(places, tl.load(places, mask=known, other=0.0) + received, mask=known)


def add_received_mass_triton(
    mass: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *, scaling: float | None = None
) -> None:
    """`attention_mass.add_received_mass` as two launches; queued on the current stream."""
    with torch.cuda.device_of(key):
        lse = _row_lse(query, key, scaling)
        received_mass_kernel[(triton.cdiv(key.shape[1], KEYS),)](
            mass, query, key, lse, query.shape[1], key.shape[1], key.shape[0],
            _factor(query, scaling), *query.stride(), *key.stride(), **_constants(query, key),
            ROWS=_row_tile(query, key), **OPTIONS,
        )  # fmt: skip


def add_block_mass_triton(
    mass: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    block_size: int,
    scaling: float | None = None,
) -> None:
    """`attention_mass.add_block_mass` as two launches; queued on the current stream."""
    rows, tokens = query.shape[1], key.shape[1]
    tile = max(KEYS, block_size)
    query_blocks = triton.cdiv(tokens, block_size) - (tokens - rows) // block_size
    with torch.cuda.device_of(key):
        lse = _row_lse(query, key, scaling)
        block_mass_kernel[(query_blocks, triton.cdiv(tokens, tile))](
            mass, query, key, lse, rows, tokens, query.shape[0], _factor(query, scaling),
            *mass.stride(), *query.stride(), *key.stride(),
            **_constants(query, key) | {"KEYS": tile}, BLOCK=block_size, **OPTIONS,
        )  # fmt: skip


def _row_lse(query: torch.Tensor, key: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Log-sum-exp of every softmax row, float32 `[heads * rows]`."""
    (heads, rows, _), (kv_heads, tokens, _) = query.shape, key.shape
    tile = _row_tile(query, key)
    splits = triton.cdiv(tokens, TOKENS_PER_SPLIT)
    lse = torch.empty(splits, heads * rows, dtype=torch.float32, device=key.device)
    row_lse_kernel[(triton.cdiv(heads // kv_heads * rows, tile), kv_heads, splits)](
        query, key, lse, rows, tokens, TOKENS_PER_SPLIT, _factor(query, scaling),
        *query.stride(), *key.stride(), **_constants(query, key), ROWS=tile, **OPTIONS,
    )  # fmt: skip
    return lse.logsumexp(dim=0)


def _factor(query: torch.Tensor, scaling: float | None) -> float:
    return float(query.shape[2] ** -0.5 if scaling is None else scaling)


def _row_tile(query: torch.Tensor, key: torch.Tensor) -> int:
    rows = query.shape[0] // key.shape[0] * query.shape[1]
    return min(MAX_ROWS, max(16, int(triton.next_power_of_2(rows))))


def _constants(query: torch.Tensor, key: torch.Tensor) -> dict[str, int]:
    most = 16 if key.dtype == torch.float32 else 32
    return {
        "GROUP": query.shape[0] // key.shape[0],
        "HEAD_DIM": query.shape[2],
        "DIMS": min(most, max(16, triton.next_power_of_2(query.shape[2]))),
        "KEYS": KEYS,
    }
