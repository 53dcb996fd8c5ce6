# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
"""Triton kernel that stores rows of a live cache: read, un-rotate, scale, pack, write.

The formats are those of `patchkv_kernels.quantize`, byte for byte where both round alike. Scales
belong to single rows, so any rows may share a tile, and each source row is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from patchkv_kernels.payload import PayloadFormat
from patchkv_kernels.quantize import groups_of
from patchkv_kernels.rotary import RopeLayout
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
def _rounded(x):
    """To the nearest integer, ties to even, for magnitudes below 2^22.

    Adding 1.5 * 2^23 leaves no fractional bits, and the addition itself rounds to even.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _is_finite(x):
    return tl.abs(x) < float("inf")  # false for NaN


@triton.jit
def _upper_byte(x):
    """The float16 nearest to `x`, and that rounded to its upper byte, ties to even; int32."""
    bits = x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    bits = tl.where(bits == 0x8000, 0, bits)  # -0 becomes 0
    return (bits + 0x7F + ((bits >> 8) & 1)) >> 8


@triton.jit
def _store_codes(
    x, codes, scales, rows, valid, BITS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, DIMS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write `x`, float32 `[ROWS, DIMS]` with zeros from `HEAD_DIM` on, as scaled integers."""
    channel = tl.arange(0, DIMS)
    if BITS == 8:
        top = tl.max(tl.abs(x), axis=1)
        finite = tl.min(_is_finite(x).to(tl.int32), axis=1) == 1
        scale = tl.minimum(tl.div_rn(top, 127.0), 65504.0).to(tl.float16)
        step = scale.to(tl.float32)
        steps = tl.div_rn(x, tl.where(step > 0, step, 1.0)[:, None])
        steps = _rounded(tl.minimum(tl.maximum(steps, -127.0), 127.0))
        code = tl.where(finite[:, None], steps, 0.0).to(tl.int8)
        mask = valid[:, None] & (channel < HEAD_DIM)[None, :]
        tl.store(codes + rows[:, None] * HEAD_DIM + channel[None, :], code, mask=mask)
        tl.store(scales + rows, tl.where(finite, scale, float("nan")), mask=valid)
    else:
        HALF: tl.constexpr = HEAD_DIM // 2
        GROUPS: tl.constexpr = (HEAD_DIM + GROUP - 1) // GROUP
        x = tl.reshape(x, [ROWS, DIMS // GROUP, GROUP])
        highest, lowest = tl.max(x, axis=2), tl.min(x, axis=2)
        finite = tl.min(_is_finite(x).to(tl.int32), axis=2) == 1
        peak = tl.where(highest >= -lowest, highest, lowest)
        peak = tl.where(finite, tl.minimum(tl.maximum(peak * -0.125, -57344.0), 57344.0), 0.0)
        byte = _upper_byte(peak)
        step = (byte << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        steps = tl.div_rn(x, tl.where(step != 0, step, 1.0)[:, :, None])
        steps = _rounded(tl.minimum(tl.maximum(steps, -8.0), 7.0))
        code = tl.where(finite[:, :, None], steps, 0.0).to(tl.int32) & 15
        code = tl.reshape(code, [ROWS, DIMS])
        upper = tl.where(channel < HALF, channel + HALF, channel)
        high = tl.gather(code, tl.broadcast_to(upper[None, :], [ROWS, DIMS]), 1)
        mask = valid[:, None] & (channel < HALF)[None, :]
        both = (code | (high << 4)).to(tl.uint8)
        tl.store(codes + rows[:, None] * HALF + channel[None, :], both, mask=mask)
        group = tl.arange(0, DIMS // GROUP)
        mask = valid[:, None] & (group < GROUPS)[None, :]
        place = scales + rows[:, None] * GROUPS + group[None, :]
        tl.store(place, tl.where(finite, byte, 0x7E).to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def gather_rows_kernel(
    keys, values, rows, cos, sin, key_channels, keys_out, values_out, key_scales, value_scales,
    count, kv_heads, heads_per_program,
    k_stride_layer, k_stride_head, k_stride_row, k_stride_dim,
    v_stride_layer, v_stride_head, v_stride_row, v_stride_dim,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr, DIMS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of rows, layers, groups of heads)."""
    layer = tl.program_id(1).to(tl.int64)
    out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = out < count
    row = tl.load(rows + out, mask=valid, other=0)
    channel = tl.arange(0, DIMS)
    real = valid[:, None] & (channel < HEAD_DIM)[None, :]
    if KEY_BITS < 16:
        angles = out.to(tl.int64) * (ROTARY_DIM // 2)
        turn_cos, turn_sin = rotation_of(cos, sin, angles, valid, ROTARY_DIM, INTERLEAVED, DIMS)
    first_head = tl.program_id(2) * heads_per_program
    for index in range(first_head, tl.minimum(kv_heads, first_head + heads_per_program)):
        head = tl.cast(index, tl.int64)
        target = (layer * kv_heads + head) * count + out
        place = target[:, None] * HEAD_DIM + channel[None, :]

        k_in = keys + layer * k_stride_layer + head * k_stride_head + row * k_stride_row
        k = tl.load(k_in[:, None] + (channel * k_stride_dim)[None, :], mask=real, other=0.0)
        v_in = values + layer * v_stride_layer + head * v_stride_head + row * v_stride_row
        v = tl.load(v_in[:, None] + (channel * v_stride_dim)[None, :], mask=real, other=0.0)

        if KEY_BITS == 16:
            tl.store(keys_out + place, k.to(keys_out.dtype.element_ty), mask=real)
        else:
            channels = key_channels + (layer * kv_heads + head) * 2 * HEAD_DIM + channel
            centre = tl.load(channels, mask=channel < HEAD_DIM, other=0.0).to(tl.float32)
            scale = tl.load(channels + HEAD_DIM, mask=channel < HEAD_DIM, other=1.0)
            turned = rotated(
                k.to(tl.float32), turn_cos, turn_sin, ROTARY_DIM, INTERLEAVED, ROWS, DIMS
            )
            residual = tl.div_rn(turned - centre[None, :], scale.to(tl.float32)[None, :])
            residual = tl.where(real, residual, 0.0)
            _store_codes(
                residual, keys_out, key_scales, target, valid, KEY_BITS, HEAD_DIM, ROWS, DIMS, GROUP
            )
        if VALUE_BITS == 16:
            tl.store(values_out + place, v.to(values_out.dtype.element_ty), mask=real)
        else:
            _store_codes(
                v.to(tl.float32), values_out, value_scales, target, valid,
                VALUE_BITS, HEAD_DIM, ROWS, DIMS, GROUP,
            )  # fmt: skip


def gather_rows_triton(
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    *,
    format: PayloadFormat,
    float_dtypes: tuple[torch.dtype, torch.dtype],
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
    layout: RopeLayout = RopeLayout.HALF_SPLIT,
    key_channels: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """`gather.gather_rows_torch` as one launch, queued on the current stream.

    Arguments and result are the same; all tensors lie on one device, `key_channels` contiguous.
    """
    layers, kv_heads, _, head_dim = keys.shape
    shape = (layers, kv_heads, len(rows))
    key_bits, value_bits = format.bits
    cos, sin = (None, None) if rotation is None else rotation
    rotary_dim = head_dim if cos is None else 2 * cos.shape[1]

    def empty(bits: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        if bits == 16:
            return keys.new_empty(*shape, head_dim, dtype=dtype), None
        if bits == 8:
            codes = keys.new_empty(*shape, head_dim, dtype=torch.int8)
            return codes, keys.new_empty(shape, dtype=torch.float16)
        codes = keys.new_empty(*shape, head_dim // 2, dtype=torch.uint8)
        return codes, keys.new_empty(*shape, groups_of(head_dim), dtype=torch.uint8)

    keys_out, key_scales = empty(key_bits, float_dtypes[0])
    values_out, value_scales = empty(value_bits, float_dtypes[1])
    constants = head_constants(head_dim, rotary_dim, layout)
    tiles = triton.cdiv(len(rows), constants["ROWS"])
    groups, heads_per_program = head_groups(kv_heads, tiles * layers)
    with torch.cuda.device_of(keys):
        gather_rows_kernel[(tiles, layers, groups)](
            keys, values, rows, cos, sin, key_channels, keys_out, values_out,
            key_scales, value_scales, len(rows), kv_heads, heads_per_program,
            *keys.stride(), *values.stride(), KEY_BITS=key_bits, VALUE_BITS=value_bits,
            **constants, **OPTIONS,
        )  # fmt: skip
    tensors = {
        "keys": keys_out,
        "values": values_out,
        "key_scales": key_scales,
        "value_scales": value_scales,
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
