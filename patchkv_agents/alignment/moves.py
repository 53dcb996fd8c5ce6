"""Moved blocks: tokens deleted at one place of the old sequence and inserted at another.

Runs keep their order, so a block that changes place is, to them, deleted here and inserted there.
Its old keys and values still exist, as those of a run do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from patchkv_agents.alignment.result import Hunk, Run
from patchkv_agents.alignment.segments import Ints, find_segments
from patchkv_agents.ranges import BoolArray, ranges_of

MIN_MOVE = 32
"""Shortest move, in tokens: twice that of a run, which only has to be equal at one place, while a
move is looked for everywhere."""

_MAX_SEGMENTS = 2048


def find_moves(
    old: Ints, new: Ints, hunks: Sequence[Hunk], shortest: int = MIN_MOVE
) -> tuple[Run, ...]:
    """Blocks of at least `shortest` equal tokens between any old and any new side of `hunks`.

    Longest first, so that a block comes back whole; no token is in two of them. O(n log n) in the
    tokens of the hunks.
    """
    old_at = _positions([(hunk.old_start, hunk.old_stop) for hunk in hunks], shortest)
    new_at = _positions([(hunk.new_start, hunk.new_stop) for hunk in hunks], shortest)
    # No token looks like the borders (-1, then -2): what is found never reaches over one.
    olds = np.where(old_at >= 0, old[old_at], _border(old, new))
    news = np.where(new_at >= 0, new[new_at], _border(old, new) - 1)
    segments = find_segments(olds, news, shortest, _MAX_SEGMENTS)
    old_free, new_free = np.ones(len(olds), dtype=bool), np.ones(len(news), dtype=bool)
    moves = []
    for at in np.argsort(-segments.length, kind="stable").tolist():
        o, n, size = (
            int(row[at]) for row in (segments.old_start, segments.new_start, segments.length)
        )
        offset, size = _longest_free(old_free[o : o + size] & new_free[n : n + size])
        o, n = o + offset, n + offset
        if size < shortest or not np.array_equal(olds[o : o + size], news[n : n + size]):
            continue  # the rest is too short; or a hash that means nothing
        old_free[o : o + size] = new_free[n : n + size] = False
        moves.append(Run(int(old_at[o]), int(new_at[n]), size))
    return tuple(sorted(moves, key=lambda move: move.new_start))


def _positions(ranges: Sequence[tuple[int, int]], shortest: int) -> Ints:
    """Positions of those ranges that are long enough for a move, -1 between two of them."""
    pieces = [
        np.append(np.arange(start, stop), np.int64(-1))
        for start, stop in ranges
        if stop - start >= shortest
    ]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def _border(old: Ints, new: Ints) -> int:
    """A number below every token."""
    return min(int(old.min(initial=0)), int(new.min(initial=0))) - 1


def _longest_free(free: BoolArray) -> tuple[int, int]:
    """Start and length of the longest stretch in which `free` is true."""
    stretches = ((stop - start, start) for start, stop in ranges_of(free))
    size, start = max(stretches, default=(0, 0))
    return start, size
