"""Views of a live cache by device, from which rows are stored and into which they are restored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from patchkv_kernels import Payload, PayloadFormat, Rope, quantize_gather


@dataclass(frozen=True, slots=True, eq=False)
class CacheShard:
    """Consecutive layers that lie on one device. A model on one device has one shard.

    Attributes:
        first: index of the first layer.
        keys, values: `[layers, kv_heads, capacity, head_dim]`.
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
