"""Half-open ranges of token positions, masks made of them, and ranking of blocks of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


def ranges_of(mask: BoolArray) -> tuple[tuple[int, int], ...]:
    """The maximal `[start, stop)` ranges in which `mask` (bool `[tokens]`) is true, ascending."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return tuple((start, stop) for start, stop in edges.reshape(-1, 2).tolist())


@dataclass(frozen=True, slots=True)
class RowSet:
    """Token positions that run through the model together: ascending, disjoint ranges.

    Rows are packed in this order: row `i` of a packed tensor is the i-th position of the set.
    """

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of_mask(cls, mask: BoolArray) -> RowSet:
        """The positions at which `mask` (bool `[tokens]`) is true."""
        return cls(ranges_of(mask))

    @classmethod
    def of_range(cls, start: int, stop: int) -> RowSet:
        """The positions `[start, stop)`; none if it is empty."""
        return cls(((start, stop),) if stop > start else ())

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    def stop(self) -> int:
        """One past the last position; 0 if there are no rows."""
        return self.ranges[-1][1] if self.ranges else 0

    def positions(self) -> IntArray:
        """Every position of the set, int64 `[rows]`."""
        if not self.ranges:
            return np.empty(0, dtype=np.int64)
        return np.concatenate([np.arange(start, stop) for start, stop in self.ranges])

    def packed(self) -> Iterator[tuple[int, int, int]]:
        """`(offset, start, stop)`: rows `offset ...` of the packed tensor are `[start, stop)`."""
        offset = 0
        for start, stop in self.ranges:
            yield offset, start, stop
            offset += stop - start

    def chunks(self, max_rows: int) -> Iterator[RowSet]:
        """The same rows in the same order, in sets of at most `max_rows` rows."""
        pending: list[tuple[int, int]] = []
        room = max_rows
        for start, stop in self.ranges:
            while start < stop:
                cut = min(stop, start + room)
                pending.append((start, cut))
                room -= cut - start
                start = cut
                if room == 0:
                    yield RowSet(tuple(pending))
                    pending, room = [], max_rows
        if pending:
            yield RowSet(tuple(pending))


def rounded_to_blocks(mask: BoolArray, block_size: int) -> BoolArray:
    """`mask` grown to whole blocks of the grid that starts at token 0."""
    tokens = len(mask)
    blocks = -(-tokens // block_size)
    padded = np.zeros(blocks * block_size, dtype=bool)
    padded[:tokens] = mask
    return np.repeat(padded.reshape(blocks, block_size).any(axis=1), block_size)[:tokens]


def mask_of(ranges: Sequence[tuple[int, int]], tokens: int) -> BoolArray:
    """The bool `[tokens]` mask that is true inside `ranges`."""
    mask = np.zeros(tokens, dtype=bool)
    for start, stop in ranges:
        mask[start:stop] = True
    return mask


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Number of equal tokens at the beginning of two sequences."""
    size = min(len(a), len(b))
    unequal = np.flatnonzero(a[:size] != b[:size])
    return int(unequal[0]) if len(unequal) else size


def ranked(values: npt.NDArray[Any], candidates: BoolArray, block_size: int) -> IntArray:
    """Indices of the blocks with a positive value of a candidate, largest first."""
    starts = np.arange(0, len(values), block_size)
    best = np.maximum.reduceat(np.where(candidates, values, 0), starts)
    order = np.argsort(-best, kind="stable")
    return order[best[order] > 0]


def within(order: IntArray, candidates: BoolArray, block_size: int, room: int) -> BoolArray:
    """The candidates in the first blocks of `order`, as many blocks as have room."""
    starts = np.arange(0, len(candidates), block_size)
    rows = np.add.reduceat(candidates.astype(np.int64), starts)
    chosen = np.zeros(len(starts), dtype=bool)
    chosen[order[np.cumsum(rows[order]) <= room]] = True
    return np.repeat(chosen, block_size)[: len(candidates)] & candidates


def largest(values: FloatArray, candidates: BoolArray, limit: int) -> FloatArray:
    """The values of the `limit` candidates that have the largest, and 0 elsewhere."""
    top = np.where(candidates, values, np.float32(0.0))
    top[np.argsort(-top, kind="stable")[limit:]] = 0
    return top


def nearest_tokens(
    distances: IntArray, candidates: BoolArray, block_size: int, limit: int
) -> BoolArray:
    """The `limit` candidates nearest behind the edits, in whole blocks but for the last."""
    block = np.arange(len(candidates)) // block_size
    nearest = np.full(block[-1] + 1, len(candidates))
    np.minimum.at(nearest, block[candidates], distances[candidates])
    tokens = np.flatnonzero(candidates)
    order = tokens[np.argsort(nearest[block[tokens]], kind="stable")]
    chosen = np.zeros(len(candidates), dtype=bool)
    chosen[order[:limit]] = True
    return chosen
