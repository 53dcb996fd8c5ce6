"""Gathers rows of a live cache into a payload; with the torch code that encodes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from patchkv_kernels.errors import PayloadError
from patchkv_kernels.payload import Payload, PayloadFormat
from patchkv_kernels.quantize import (
    FLOAT16_MAX,
    encode_groups,
    encode_rows,
    groups_of,
    key_channels,
    normalised,
    sampled_rows,
)
from patchkv_kernels.rotary import Rope, RopeLayout, rotate_keys
from patchkv_kernels.row_moves import IntArray, rotation_table, to_device

_Range = tuple[int, int, int]


@torch.inference_mode()
def quantize_gather(
    keys: torch.Tensor,
    values: torch.Tensor,
    ranges: Sequence[_Range],
    *,
    format: PayloadFormat,
    rope: Rope,
    channels: torch.Tensor | None = None,
) -> Payload:
    """Gather, encode and pack rows of a live cache into a payload in CPU memory.

    Rows that were stored as `NATIVE` can be encoded later: give the tensors of that payload, with
    its rows and write positions as `ranges`.

    Args:
        keys, values: `[layers, kv_heads, capacity, head_dim]`, any strides, any device; not
            changed.
        ranges: `(start, stop, position)`: rows `[start, stop)` make one block, whose keys were
            written at `position` and the positions behind it.
        format: of the result.
        rope: what the keys were written with.
        channels: `key_channels` of another payload, to be used and shared by this one; its own
            are taken where None. Rows of payloads that share them can be joined unchanged.

    Returns:
        A payload that holds the ranges in their order; in pinned memory where `keys` lies on a
        GPU. The copy is complete when the call returns.

    Raises:
        PayloadError: the tensors do not belong together, or a range has no rows or too many.
    """
    _check(keys, values, ranges, format)
    starts, stops, positions = np.array(ranges, dtype=np.int64).T
    lengths = stops - starts
    block_rows = np.concatenate([[0], lengths.cumsum()])
    within = np.arange(block_rows[-1]) - np.repeat(block_rows[:-1], lengths)
    rows = to_device(np.repeat(starts, lengths) + within, keys.device)
    written = np.repeat(positions, lengths) + within
    dtypes = (_float_dtype(keys, rows, format), _float_dtype(values, rows, format))
    # Keys that stay as they are need no rotation: all layers at once then.
    whole = range(len(keys))
    runs = rope.runs(whole) if format.is_quantised else [(whole, rope)]
    parts = []
    for layers, own in runs:
        part = slice(layers.start, layers.stop)
        given = None if channels is None else channels[part]
        # Triton launches on the current device.
        with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]
            gathered = _gathered(
                keys[part], values[part], rows, written, format, dtypes, own, given
            )
        parts.append(gathered)
    tensors = parts[0]
    if len(parts) > 1:
        tensors = {name: torch.cat([part[name] for part in parts]) for name in tensors}
    tensors = _on_cpu(tensors)
    if format.is_quantised and channels is not None:
        tensors["key_channels"] = channels
    return Payload(format=format, block_rows=block_rows, positions=positions.copy(), **tensors)


def _gathered(
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    written: IntArray,
    format: PayloadFormat,
    dtypes: tuple[torch.dtype, torch.dtype],
    rope: Rope,
    channels: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """The payload's tensors of layers that share one rope, on the device of `keys`."""
    if keys.is_cuda:
        from patchkv_kernels.triton_quantize import gather_rows_triton as gather
    else:
        gather = gather_rows_torch
    rotation = None
    if format.is_quantised:
        rotation = rotation_table(rope, written, np.zeros_like(written), keys.device)
        if channels is None:
            channels = _sampled_channels(keys, rows, rotation, rope.layout)
        channels = channels.to(keys.device)
    tensors = gather(
        keys,
        values,
        rows,
        format=format,
        float_dtypes=dtypes,
        rotation=rotation,
        layout=rope.layout,
        key_channels=channels,
    )
    return tensors if channels is None else {**tensors, "key_channels": channels}


def gather_rows_torch(
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
    """Encode `rows` of all layers and heads, a layer at a time, on the device of `keys`.

    The reference of the Triton kernel, and the path of the CPU, where a layer stays in the cache.

    Args:
        keys, values: `[layers, kv_heads, capacity, head_dim]`; not changed.
        rows: int64 `[n]`, at least one.
        format: of the result.
        float_dtypes: of keys and values where they stay floating point.
        rotation: cosine and sine that take each row's key back to position 0, float32
            `[n, rotary_dim / 2]`; needed for quantised formats.
        layout: how the model pairs channels.
        key_channels: float16 `[layers, kv_heads, 2, head_dim]`; needed for quantised formats.

    Returns:
        The tensors of the payload by name, without `key_channels`.
    """
    layers, kv_heads, _, head_dim = keys.shape
    key_bits, value_bits = format.bits
    tensors = {
        **_outputs("key", key_bits, (layers, kv_heads, len(rows), head_dim), float_dtypes[0], keys),
        **_outputs(
            "value", value_bits, (layers, kv_heads, len(rows), head_dim), float_dtypes[1], values
        ),
    }
    for layer in range(layers):
        k, v = keys[layer].index_select(1, rows), values[layer].index_select(1, rows)
        if rotation is not None and key_channels is not None:
            k = _unrotated(k, rotation, layout)
            k = normalised(k, key_channels[layer])
        _encode(k, key_bits, tensors["keys"][layer], tensors.get("key_scales"), layer)
        _encode(v, value_bits, tensors["values"][layer], tensors.get("value_scales"), layer)
    return tensors


def _outputs(
    name: str, bits: int, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor
) -> dict[str, torch.Tensor]:
    if bits == 16:
        return {f"{name}s": like.new_empty(shape, dtype=dtype)}
    *rows, head_dim = shape
    if bits == 8:
        return {
            f"{name}s": like.new_empty(shape, dtype=torch.int8),
            f"{name}_scales": like.new_empty(rows, dtype=torch.float16),
        }
    return {
        f"{name}s": like.new_empty(*rows, head_dim // 2, dtype=torch.uint8),
        f"{name}_scales": like.new_empty(*rows, groups_of(head_dim), dtype=torch.uint8),
    }


def _encode(
    x: torch.Tensor, bits: int, codes: torch.Tensor, scales: torch.Tensor | None, layer: int
) -> None:
    if scales is None:
        codes.copy_(x)
        return
    encode = encode_rows if bits == 8 else encode_groups
    encoded, own_scales = encode(x.float())
    codes.copy_(encoded)
    scales[layer].copy_(own_scales)


def _unrotated(
    keys: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], layout: RopeLayout
) -> torch.Tensor:
    """Keys `[..., rows, head_dim]` before rotation, float32."""
    out = torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
    rotate_keys(keys, *rotation, layout=layout, out=out)
    return out


def _sampled_channels(
    keys: torch.Tensor,
    rows: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    layout: RopeLayout,
) -> torch.Tensor:
    """Centres and scales of the key channels of `rows`, float16 `[layers, kv_heads, 2, dim]`."""
    sample = sampled_rows(len(rows)).to(keys.device)
    cos, sin = (table[sample] for table in rotation)
    return key_channels(_unrotated(keys.index_select(2, rows[sample]), (cos, sin), layout))


def _float_dtype(tensor: torch.Tensor, rows: torch.Tensor, format: PayloadFormat) -> torch.dtype:
    """The dtype in which `format` stores floating-point rows."""
    if format is not PayloadFormat.F16 or tensor.dtype.itemsize == 2:
        return tensor.dtype
    largest = 0.0
    for layer in tensor:
        magnitudes = layer.index_select(1, rows).abs()
        largest = max(largest, float(magnitudes.where(magnitudes.isfinite(), 0.0).amax()))
    return torch.float16 if largest <= FLOAT16_MAX else torch.bfloat16


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in CPU memory, those of a GPU in pinned memory."""
    moved = {}
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            moved[name] = pinned.copy_(tensor, non_blocking=True)
        else:
            moved[name] = tensor.cpu()
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream(tensors["keys"].device).synchronize()
    return moved


def _check(
    keys: torch.Tensor, values: torch.Tensor, ranges: Sequence[_Range], format: PayloadFormat
) -> None:
    if keys.ndim != 4 or keys.shape != values.shape or keys.device != values.device:
        raise PayloadError(
            f"keys {tuple(keys.shape)} on {keys.device} and values {tuple(values.shape)} on "
            f"{values.device} must both be [layers, kv_heads, capacity, head_dim] on one device"
        )
    if format.is_quantised and keys.shape[3] % 8:
        raise PayloadError(
            f"head_dim is {keys.shape[3]}, and quantised formats need a multiple of 8: use another"
        )
    if not ranges:
        raise PayloadError("there are no rows to store: give at least one range")
    for start, stop, position in ranges:
        if not 0 <= start < stop <= keys.shape[2] or position < 0:
            raise PayloadError(
                f"range ({start}, {stop}, {position}) must hold rows in [0, {keys.shape[2]}) and a "
                "position of 0 or more"
            )
