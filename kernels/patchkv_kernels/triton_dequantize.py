# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
"""Triton kernel that restores rows into a live cache: read, dequantise, rotate, write.

One launch does keys and values of any number of blocks, heads and layers of one payload. Every
payload byte that is wanted is read once, every wanted cache row is written once, nothing else is
touched. A program takes a tile of moves and goes through heads, so that the rotation of its rows
is read once for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from patchkv_kernels.errors import PayloadError
from patchkv_kernels.payload import Payload
from patchkv_kernels.row_moves import RowMoves
from patchkv_kernels.triton_rows import (
    OPTIONS,
    UNALIGNED,
    UNSPECIALISED,
    head_constants,
    head_groups,
    rotated,
    rotation_of,
)


@triton.jit
def _codes(
    codes, scales, rows, valid, BITS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Scaled integers of `rows` (counted over heads and layers), float32 `[rows, DIMS]`."""
    channel = tl.arange(0, DIMS)
    mask = valid[:, None] & (channel < HEAD_DIM)[None, :]
    if BITS == 8:
        code = tl.load(codes + rows[:, None] * HEAD_DIM + channel[None, :], mask=mask, other=0)
        scale = tl.load(scales + rows, mask=valid, other=0.0).to(tl.float32)
        return code.to(tl.float32) * scale[:, None]
    HALF: tl.constexpr = HEAD_DIM // 2
    GROUPS: tl.constexpr = (HEAD_DIM + GROUP - 1) // GROUP
    byte = tl.load(codes + rows[:, None] * HALF + (channel % HALF)[None, :], mask=mask, other=0)
    code = (byte.to(tl.int32) >> (channel // HALF * 4)[None, :]) & 15
    place = scales + rows[:, None] * GROUPS + (channel // GROUP)[None, :]
    scale = tl.load(place, mask=mask, other=0).to(tl.uint16) << 8
    code = (code ^ 8) - 8  # two's complement of 4 bits
    return code.to(tl.float32) * scale.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def scatter_rows_kernel(
    keys, values, key_scales, value_scales, key_channels, keys_out, values_out,
    rows, slots, cos, sin, moved, moves, payload_rows, kv_heads, heads_per_program,
    k_stride_layer, k_stride_head, k_stride_row, k_stride_dim,
    v_stride_layer, v_stride_head, v_stride_row, v_stride_dim,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, ROTATE: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr, DIMS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of moves, layers, groups of heads)."""
    layer = tl.program_id(1).to(tl.int64)
    move = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = move < moves
    row = tl.load(rows + move, mask=valid, other=0)
    slot = tl.load(slots + move, mask=valid, other=0)
    channel = tl.arange(0, DIMS)
    real = valid[:, None] & (channel < HEAD_DIM)[None, :]
    if ROTATE:
        angles = move.to(tl.int64) * (ROTARY_DIM // 2)
        turn_cos, turn_sin = rotation_of(cos, sin, angles, valid, ROTARY_DIM, INTERLEAVED, DIMS)
        keep = tl.load(moved + move, mask=valid, other=0) == 0
    first_head = tl.program_id(2) * heads_per_program
    for index in range(first_head, tl.minimum(kv_heads, first_head + heads_per_program)):
        head = tl.cast(index, tl.int64)
        source = (layer * kv_heads + head) * payload_rows + row
        place = source[:, None] * HEAD_DIM + channel[None, :]

        if KEY_BITS == 16:
            stored = tl.load(keys + place, mask=real, other=0.0)
            k = stored.to(tl.float32)
        else:
            channels = key_channels + (layer * kv_heads + head) * 2 * HEAD_DIM + channel
            centre = tl.load(channels, mask=channel < HEAD_DIM, other=0.0).to(tl.float32)
            scale = tl.load(channels + HEAD_DIM, mask=channel < HEAD_DIM, other=0.0)
            x = _codes(keys, key_scales, source, valid, KEY_BITS, HEAD_DIM, GROUP, DIMS)
            k = centre[None, :] + scale.to(tl.float32)[None, :] * x
        # Before the keys are stored, so that both loads are under way together.
        if VALUE_BITS == 16:
            v = tl.load(values + place, mask=real, other=0.0)
        else:
            v = _codes(values, value_scales, source, valid, VALUE_BITS, HEAD_DIM, GROUP, DIMS)

        if ROTATE:
            k = rotated(k, turn_cos, turn_sin, ROTARY_DIM, INTERLEAVED, ROWS, DIMS)
        out = k.to(keys_out.dtype.element_ty)
        if KEY_BITS == 16:
            # Unmoved keys never pass through float32: their bits stay, those of a NaN included.
            if ROTATE:
                out = tl.where(keep[:, None], stored.to(out.dtype), out)
            else:
                out = stored.to(out.dtype)
        k_out = keys_out + layer * k_stride_layer + head * k_stride_head + slot * k_stride_row
        tl.store(k_out[:, None] + (channel * k_stride_dim)[None, :], out, mask=real)

        v_out = values_out + layer * v_stride_layer + head * v_stride_head + slot * v_stride_row
        v_out = v_out[:, None] + (channel * v_stride_dim)[None, :]
        tl.store(v_out, v.to(values_out.dtype.element_ty), mask=real)


def scatter_rows_triton(
    payload: Payload, moves: RowMoves, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """`scatter.scatter_rows` of at least one row on a GPU, as one launch on the current stream.

    Raises:
        PayloadError: payload, moves and cache lie on different devices.
    """
    if payload.keys.device != keys.device or moves.rows.device != keys.device:
        raise PayloadError(
            f"the payload lies on {payload.keys.device}, its moves on {moves.rows.device} and the "
            f"cache on {keys.device}: copy the payload to the cache's device first"
        )
    tensors = {name: tensor.contiguous() for name, tensor in payload.tensors.items()}
    layers, kv_heads, rows, _ = payload.keys.shape
    head_dim = keys.shape[3]
    rotary_dim = head_dim if moves.cos is None else 2 * moves.cos.shape[1]
    key_bits, value_bits = payload.format.bits
    constants = head_constants(head_dim, rotary_dim, moves.layout)
    tiles = triton.cdiv(len(moves.rows), constants["ROWS"])
    groups, heads_per_program = head_groups(kv_heads, tiles * layers)
    with torch.cuda.device_of(keys):
        scatter_rows_kernel[(tiles, layers, groups)](
            tensors["keys"], tensors["values"], tensors.get("key_scales"),
            tensors.get("value_scales"), tensors.get("key_channels"), keys, values,
            moves.rows, moves.slots, moves.cos, moves.sin, moves.moved, len(moves.rows),
            rows, kv_heads, heads_per_program, *keys.stride(), *values.stride(),
            KEY_BITS=key_bits, VALUE_BITS=value_bits, ROTATE=moves.cos is not None,
            **constants, **OPTIONS,
        )  # fmt: skip
