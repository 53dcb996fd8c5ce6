"""Writing stored rows into a live cache at their new positions."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from patchkv_agents.checkpoint import Extent
from patchkv_agents.recovery.rope import Rope
from patchkv_kernels import rotate_keys


@torch.inference_mode()
def restore_rows(
    extents: Iterable[Extent], keys: torch.Tensor, values: torch.Tensor, rope: Rope
) -> int:
    """Copy the rows of `extents` into a cache, rotating keys whose position changed.

    Only the rows of the extents are written. A key that keeps its position is copied bit for bit.

    Args:
        extents: stored rows at their positions in the new version.
        keys, values: of the cache, `[layers, kv_heads, capacity, head_dim]`; changed in place.
        rope: what the keys were written with.

    Returns:
        Bytes of the source blocks that were read, whole blocks counted once.
    """
    touched: dict[int, int] = {}
    for extent in extents:
        block = extent.block
        touched[id(block)] = block.nbytes
        taken = slice(extent.offset, extent.offset + extent.length)
        rows = slice(extent.position, extent.position + extent.length)
        stored, destination = block.keys[:, :, taken], keys[:, :, rows]
        values[:, :, rows].copy_(block.values[:, :, taken])
        if extent.delta == 0:
            destination.copy_(stored)
            continue
        wanted = np.arange(extent.position, extent.position + extent.length)
        cos, sin = rope.rotation(wanted - extent.delta, wanted, keys.device)
        rotate_keys(
            stored.to(keys.device, non_blocking=True),
            cos,
            sin,
            layout=rope.layout,
            out=destination,
        )
    return sum(touched.values())
