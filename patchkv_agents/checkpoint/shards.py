"""Views of a live cache by device, from which rows are stored and into which they are restored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch

from patchkv_kernels import Payload, PayloadFormat, Rope, quantize_gather


@dataclass(frozen=True, slots=True, eq=False)
class CacheShard:
    """Consecutive layers of one size on one device; a model usually has one shard.

    Attributes:
        first: index of the first layer.
        keys, values: `[layers, kv_heads, capacity, width]`.
    """

    first: int
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def layers(self) -> range:
        """Indices of the layers."""
        return range(self.first, self.first + len(self.keys))

    @property
    def device(self) -> torch.device:
        """Where the layers lie."""
        return self.keys.device


def are_even(shards: Sequence[CacheShard]) -> bool:
    """Whether all layers have keys and values of one size, as the quantised formats need."""
    sizes = {(t.shape[1], t.shape[3]) for shard in shards for t in (shard.keys, shard.values)}
    return len(sizes) == 1


def unfolded(stored: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Rows of some layers as their cache has them: `[layers, kv_heads, rows, width]`.

    Args:
        stored: such rows, or folded ones, `[layers, 1, rows, elements]`, padded at the end.
        cache: of the layers, `[layers, kv_heads, capacity, width]`.
    """
    heads, width = cache.shape[1], cache.shape[3]
    if stored.shape[1] == heads and stored.shape[3] == width:
        return stored
    rows = stored[:, 0, :, : heads * width]
    return rows.reshape(*rows.shape[:2], heads, width).transpose(1, 2)


def gather(
    shards: Sequence[CacheShard],
    ranges: Sequence[tuple[int, int, int]],
    *,
    format: PayloadFormat,
    rope: Rope,
    channels: torch.Tensor | None = None,
) -> Payload:
    """`quantize_gather` for layers on several devices: one payload of all of them, on the CPU.

    Args:
        shards: all layers, in order; not changed.
        ranges, format, rope, channels: as for `quantize_gather`, of all layers.
    """
    if not are_even(shards):
        return _gather_folded(shards, ranges)
    parts = []
    for shard in shards:
        own = slice(shard.layers.start, shard.layers.stop)
        given = channels if channels is None or len(shards) == 1 else channels[own]
        part = quantize_gather(
            shard.keys,
            shard.values,
            ranges,
            format=format,
            rope=rope.of_layers(shard.layers),
            channels=given,
        )
        parts.append(part)
    if len(parts) == 1:
        return parts[0]
    tensors: dict[str, Any] = {
        name: _joined([part.tensors[name] for part in parts], format) for name in parts[0].tensors
    }
    if format.is_quantised and channels is not None:
        tensors["key_channels"] = channels  # the same object, by which payloads are joined
    return replace(parts[0], **tensors)


def _gather_folded(shards: Sequence[CacheShard], ranges: Sequence[tuple[int, int, int]]) -> Payload:
    """Rows of layers of several sizes, as the model wrote them, with the heads of a row in one.

    Rows of narrow layers are padded to the widest layer's.
    """
    tensors = {}
    for name in ("keys", "values"):
        sources = [getattr(shard, name) for shard in shards]
        elements = max(source.shape[1] * source.shape[3] for source in sources)
        dtype = reduce(torch.promote_types, (source.dtype for source in sources))
        shape = (
            sum(map(len, sources)),
            1,
            sum(stop - start for start, stop, _ in ranges),
            elements,
        )
        pinned = any(source.is_cuda for source in sources)
        tensors[name] = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        for shard, source in zip(shards, sources, strict=True):
            out, row = tensors[name][shard.first : shard.first + len(source), 0], 0
            for start, stop, _ in ranges:
                rows = source[:, :, start:stop].transpose(1, 2).flatten(2)
                out[:, row : row + stop - start, : rows.shape[2]] = rows
                row += stop - start
    lengths = [stop - start for start, stop, _ in ranges]
    return Payload(
        format=PayloadFormat.NATIVE,
        keys=tensors["keys"],
        values=tensors["values"],
        block_rows=np.cumsum([0, *lengths]),
        positions=np.array([written for _, _, written in ranges], dtype=np.int64),
    )


def _joined(tensors: list[torch.Tensor], format: PayloadFormat) -> torch.Tensor:
    """All layers in one dtype, in pinned memory where a GPU's are.

    Layers of a model may have several dtypes: those of native rows are kept in one that holds all
    of them without loss. 16-bit rows of a float32 model are bfloat16 in shards with values too
    large for float16, and then in all.
    """
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    if format is PayloadFormat.F16 and dtype.itemsize > 2:
        dtype = torch.bfloat16
    shape = (sum(map(len, tensors)), *tensors[0].shape[1:])
    pinned = any(tensor.is_pinned() for tensor in tensors)
    joined = torch.empty(shape, dtype=dtype, pin_memory=pinned)
    return torch.cat([tensor.to(dtype) for tensor in tensors], out=joined)
