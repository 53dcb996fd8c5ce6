"""Source blocks: the immutable pieces in which the KV rows of a paused version are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from patchkv_agents.ranges import BoolArray, IntArray, RowSet, mask_of

BLOCK_SIZE = 32
"""Tokens of a source block."""


@dataclass(frozen=True, slots=True, eq=False)
class SourceBlock:
    """Rows of one block, all layers, as the model wrote them. Never changed, shared by reference.

    Attributes:
        keys, values: `[layers, kv_heads, tokens, head_dim]` in the model's dtype, on the CPU.
        position: position at which the first key was written.
    """

    keys: torch.Tensor
    values: torch.Tensor
    position: int

    @property
    def nbytes(self) -> int:
        """Payload of the block in bytes."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive rows of a source block, and where a version has them.

    Attributes:
        block: the payload.
        offset: first row inside the block.
        length: number of rows.
        position: position of the first row in the version.
    """

    block: SourceBlock
    offset: int
    length: int
    position: int

    @property
    def stop(self) -> int:
        """One past the last position in the version."""
        return self.position + self.length

    def alone(self) -> Extent:
        """The same rows in a block that holds no others."""
        if self.length == self.block.keys.shape[2]:
            return self
        rows = slice(self.offset, self.offset + self.length)
        block = SourceBlock(
            keys=_stored(self.block.keys[:, :, rows]),
            values=_stored(self.block.values[:, :, rows]),
            position=self.block.position + self.offset,
        )
        return Extent(block, 0, self.length, self.position)

    @property
    def delta(self) -> int:
        """How far the rows have moved since their keys were written."""
        return self.position - (self.block.position + self.offset)


def moved_extents(extents: Sequence[Extent], source: IntArray) -> tuple[Extent, ...]:
    """The extents of an edited version: the same payload at new positions.

    Args:
        extents: of the old version, ascending and disjoint.
        source: old position of each new row, -1 where the row is not wanted; int64
            `[tokens_new]`, ascending where wanted. Rows that `extents` do not hold are left out.
    """
    wanted = np.flatnonzero(source >= 0)
    if not len(wanted) or not extents:
        return ()
    # Rows that follow each other in both versions move together.
    breaks = np.flatnonzero((np.diff(wanted) != 1) | (np.diff(source[wanted]) != 1)) + 1
    firsts = wanted[np.concatenate([[0], breaks])]
    lengths = np.diff(np.concatenate([[0], breaks, [len(wanted)]]))
    moved: list[Extent] = []
    index = 0
    for new_start, length in zip(firsts.tolist(), lengths.tolist(), strict=True):
        old_start = int(source[new_start])
        old_stop = old_start + length
        while index < len(extents) and extents[index].stop <= old_start:
            index += 1
        here = index
        while here < len(extents) and extents[here].position < old_stop:
            extent = extents[here]
            start, stop = max(extent.position, old_start), min(extent.stop, old_stop)
            moved.append(
                replace(
                    extent,
                    offset=extent.offset + start - extent.position,
                    length=stop - start,
                    position=new_start + start - old_start,
                )
            )
            here += 1
    return tuple(moved)


def stored_mask(extents: Sequence[Extent], tokens: int) -> BoolArray:
    """Rows that `extents` hold, bool `[tokens]`."""
    return mask_of([(extent.position, extent.stop) for extent in extents], tokens)


@torch.inference_mode()
def store_rows(
    keys: torch.Tensor, values: torch.Tensor, rows: RowSet, block_size: int = BLOCK_SIZE
) -> tuple[Extent, ...]:
    """Copy rows of a live cache into new source blocks on the grid of `block_size` tokens.

    Args:
        keys, values: `[layers, kv_heads, capacity, head_dim]`; not changed.
        rows: positions to store.
        block_size: tokens of a block; a block holds fewer where `rows` begin or end inside it.
    """
    extents: list[Extent] = []
    for start, stop in rows.ranges:
        first = start
        while first < stop:
            last = min(stop, (first // block_size + 1) * block_size)
            block = SourceBlock(
                keys=_stored(keys[:, :, first:last]),
                values=_stored(values[:, :, first:last]),
                position=first,
            )
            extents.append(Extent(block, 0, last - first, first))
            first = last
    return tuple(extents)


def _stored(rows: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU."""
    return torch.empty(rows.shape, dtype=rows.dtype, device="cpu").copy_(rows)
