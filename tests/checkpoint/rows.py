"""Caches and payloads whose every row names itself, and what extents hold of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from patchkv_agents.checkpoint import Checkpoint, Extent
from patchkv_agents.ranges import BoolArray, IntArray
from patchkv_kernels import Rope, RopeLayout
from patchkv_kernels.payload import Payload, PayloadFormat

ROPE = Rope(np.array([1.0, 0.1], dtype=np.float32), RopeLayout.HALF_SPLIT)


def cache_of(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache whose every key and value is its row number, `[2, 3, tokens, 8]`."""
    keys = torch.arange(tokens, dtype=torch.float32)[None, None, :, None].expand(2, 3, tokens, 8)
    return keys.clone(), -keys.clone()


def scaled_payload(lengths: list[int], positions: list[int], first: int = 0) -> Payload:
    """A quantised payload in blocks: row r has bytes and scales r + `first`."""
    rows = sum(lengths)
    row = torch.arange(rows) + first
    codes = row.to(torch.int8)[None, None, :, None].expand(2, 3, rows, 8)
    scales = row.half()[None, None, :].expand(2, 3, rows)
    return Payload(
        PayloadFormat.K8V8,
        keys=codes.clone(),
        values=-codes,
        key_scales=scales.clone(),
        value_scales=scales / 2,
        key_channels=torch.ones(2, 3, 2, 8, dtype=torch.float16),
        block_rows=np.cumsum([0, *lengths]),
        positions=np.array(positions),
    )


def as_format(payload: Payload, format: PayloadFormat) -> Payload:
    return replace(payload, format=format)


def read(extents: tuple[Extent, ...], tokens: int) -> IntArray:
    """The first key of the row at each position, -1 where no extent is; each position once."""
    found = np.full(tokens, -1)
    for extent in extents:
        rows = slice(extent.row, extent.row + extent.length)
        assert (found[extent.position : extent.stop] == -1).all()
        keys = extent.payload.keys[1, 2, rows, 3]
        assert torch.equal(keys, -extent.payload.values[0, 0, rows, 0])
        found[extent.position : extent.stop] = keys.numpy()
    return found


def stored_rows(checkpoint: Checkpoint, positions: IntArray) -> list[tuple[bytes, ...]]:
    """Everything that is stored of each of the positions: format, write position, all bytes."""
    rows = []
    for position in positions.tolist():
        (extent,) = [e for e in checkpoint.extents if e.position <= position < e.stop]
        payload, row = extent.payload, extent.row + position - extent.position
        content = [payload.format.value.encode(), str(payload.row_positions()[row]).encode()]
        for name, tensor in payload.tensors.items():
            kept = tensor if name == "key_channels" else tensor[:, :, row]
            content.append(kept.contiguous().view(torch.uint8).numpy().tobytes())
        rows.append(tuple(content))
    return rows


def checkpoint_of(extents: tuple[Extent, ...], tokens: int) -> Checkpoint:
    return Checkpoint(
        np.arange(tokens), np.zeros(tokens, np.int16), np.zeros(tokens, np.float32), extents
    )


def mask(*ranges: tuple[int, int], tokens: int) -> BoolArray:
    rows = np.zeros(tokens, dtype=bool)
    for start, stop in ranges:
        rows[start:stop] = True
    return rows
