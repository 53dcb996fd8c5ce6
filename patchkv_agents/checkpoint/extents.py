"""Extents: the places of payload rows in a version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from patchkv_agents.ranges import BoolArray, IntArray, mask_of
from patchkv_kernels.payload import Payload


@dataclass(frozen=True, slots=True)
class Extent:
    """Payload rows that are consecutive in three ways: stored, written, and in the version.

    Attributes:
        payload: holds the rows, and others.
        row: first row in the payload.
        length: number of rows, at least 1; their write positions follow each other.
        position: position of the first row in the version.
    """

    payload: Payload
    row: int
    length: int
    position: int

    @property
    def stop(self) -> int:
        """One past the last position in the version."""
        return self.position + self.length

    @property
    def written(self) -> int:
        """Position at which the first row was written."""
        return written_at(self.payload, self.row)

    @property
    def delta(self) -> int:
        """How far the rows have moved since their keys were written."""
        return self.position - self.written

    def part(self, start: int, stop: int) -> Extent:
        """The rows at the version's positions `[start, stop)`, which lie inside."""
        return replace(
            self, row=self.row + start - self.position, length=stop - start, position=start
        )


def written_at(payload: Payload, row: int) -> int:
    """Position at which a payload row was written."""
    block = int(np.searchsorted(payload.block_rows, row, side="right")) - 1
    return int(payload.positions[block]) + row - int(payload.block_rows[block])


def merged(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """The same rows, with adjacent extents joined where one continues the other.

    Args:
        extents: ascending and disjoint in the version.
    """
    joined: list[Extent] = []
    for extent in extents:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.payload is extent.payload
            and last.stop == extent.position
            and last.row + last.length == extent.row
            and last.written + last.length == extent.written
        ):
            joined[-1] = replace(last, length=last.length + extent.length)
        else:
            joined.append(extent)
    return tuple(joined)


def extents_of(payload: Payload, positions: Sequence[int]) -> tuple[Extent, ...]:
    """The blocks of a payload at the given positions of a version (`[blocks]`), ascending."""
    rows = payload.block_rows.tolist()
    blocks = [
        Extent(payload, row, stop - row, position)
        for row, stop, position in zip(rows, rows[1:], positions, strict=False)
    ]
    return merged(sorted(blocks, key=lambda extent: extent.position))


def moved_extents(extents: Sequence[Extent], source: IntArray) -> tuple[Extent, ...]:
    """The extents of an edited version: the same payload at new positions.

    Args:
        extents: of the old version, ascending and disjoint.
        source: old position of each new row in any order, -1 where the row is not wanted; int64
            `[tokens_new]`. Rows that `extents` do not hold are left out.
    """
    if not extents:
        return ()
    targets = np.flatnonzero(source >= 0)
    old = source[targets]
    starts = np.array([extent.position for extent in extents])
    stops = np.array([extent.stop for extent in extents])
    owners = np.searchsorted(starts, old, side="right") - 1
    is_stored = (owners >= 0) & (old < stops[owners])
    targets, old, owners = targets[is_stored], old[is_stored], owners[is_stored]
    if not len(targets):
        return ()
    # Rows that follow each other in both versions and in one extent move together.
    breaks = (np.diff(targets) != 1) | (np.diff(old) != 1) | (np.diff(owners) != 0)
    firsts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    lengths = np.diff(np.append(firsts, len(targets)))
    moved = []
    for index, start, length, position in zip(
        owners[firsts].tolist(),
        old[firsts].tolist(),
        lengths.tolist(),
        targets[firsts].tolist(),
        strict=True,
    ):
        moved.append(replace(extents[index].part(start, start + length), position=position))
    return merged(moved)


def stored_mask(extents: Sequence[Extent], tokens: int) -> BoolArray:
    """Rows that `extents` hold, bool `[tokens]`."""
    return mask_of([(extent.position, extent.stop) for extent in extents], tokens)
