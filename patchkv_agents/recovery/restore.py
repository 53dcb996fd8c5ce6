"""Writing stored rows into a live cache at their new positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch

from patchkv_agents.checkpoint import Extent
from patchkv_agents.ranges import IntArray
from patchkv_kernels import RopeLayout, rotate_keys


class RowBuffer(Protocol):
    """Where rows are written: `keys` and `values`, `[layers, kv_heads, capacity, head_dim]`."""

    keys: torch.Tensor
    values: torch.Tensor


class KeyMover(Protocol):
    """The rotary embedding that the keys were written with."""

    @property
    def layout(self) -> RopeLayout: ...

    def rotation(
        self, written: IntArray, wanted: IntArray, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@torch.inference_mode()
def restore_rows(extents: Iterable[Extent], buffer: RowBuffer, rope: KeyMover) -> int:
    """Copy the rows of `extents` into `buffer`, rotating keys whose position changed.

    Only the rows of the extents are written. A key that keeps its position is copied bit for bit.

    Returns:
        Bytes of the source blocks that were read, whole blocks counted once.
    """
    touched: dict[int, int] = {}
    for extent in extents:
        block = extent.block
        touched[id(block)] = block.nbytes
        taken = slice(extent.offset, extent.offset + extent.length)
        rows = slice(extent.position, extent.position + extent.length)
        keys, destination = block.keys[:, :, taken], buffer.keys[:, :, rows]
        buffer.values[:, :, rows].copy_(block.values[:, :, taken])
        if extent.delta == 0:
            destination.copy_(keys)
            continue
        wanted = np.arange(extent.position, extent.position + extent.length)
        cos, sin = rope.rotation(wanted - extent.delta, wanted, buffer.keys.device)
        rotate_keys(
            keys.to(buffer.keys.device, non_blocking=True),
            cos,
            sin,
            layout=rope.layout,
            out=destination,
        )
    return sum(touched.values())
