"""The alignment of two token sequences: runs, hunks, moves, prefix, position map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Run:
    """`length` tokens that are equal in both sequences, without a gap.

    `old[old_start : old_start + length] == new[new_start : new_start + length]`.
    """

    old_start: int
    new_start: int
    length: int

    @property
    def old_stop(self) -> int:
        """End of the run in the old sequence (exclusive)."""
        return self.old_start + self.length

    @property
    def new_stop(self) -> int:
        """End of the run in the new sequence (exclusive)."""
        return self.new_start + self.length

    @property
    def shift(self) -> int:
        """How far the run moved, in tokens: new position minus old position."""
        return self.new_start - self.old_start


@dataclass(frozen=True, slots=True)
class Hunk:
    """`old[old_start:old_stop]` was replaced by `new[new_start:new_stop]`; one may be empty."""

    old_start: int
    old_stop: int
    new_start: int
    new_stop: int

    def to_dict(self) -> dict[str, list[int]]:
        """The two ranges as JSON values: `{"old": [start, stop], "new": [start, stop]}`."""
        return {
            "old": [self.old_start, self.old_stop],
            "new": [self.new_start, self.new_stop],
        }


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which tokens of a new sequence are old ones, in order, and where they were.

    `runs` increase strictly in both sequences and do not overlap; `hunks` are the gaps before,
    between and after them, in order. Runs and hunks together tile both sequences.

    `moves` are blocks that went from the old side of one place to the new side of another, out of
    order: each lies inside one hunk on either side, in the order of the new sequence, and no
    token is in two of them. Runs, hunks, `aligned_tokens` and `recoverable_tokens` do not count
    them: to a plan that does not restore moves, their tokens are gone and new.
    """

    tokens_old: int
    tokens_new: int
    runs: tuple[Run, ...]
    hunks: tuple[Hunk, ...]
    moves: tuple[Run, ...] = ()

    @property
    def prefix(self) -> int:
        """Tokens before the first difference: the length of the run at (0, 0), else 0."""
        if self.runs and self.runs[0].old_start == 0 and self.runs[0].new_start == 0:
            return self.runs[0].length
        return 0

    @property
    def aligned_tokens(self) -> int:
        """Tokens of the new sequence that are old ones, the prefix included."""
        return sum(run.length for run in self.runs)

    @property
    def recoverable_tokens(self) -> int:
        """Aligned tokens after the prefix: what an exact prefix cache loses and has old state."""
        return self.aligned_tokens - self.prefix

    @property
    def moved_tokens(self) -> int:
        """Tokens of the new sequence in moved blocks."""
        return sum(move.length for move in self.moves)

    def position_map(self, *, moves: bool = False) -> NDArray[np.int64]:
        """Old position of each new token, int64 `[tokens_new]`; -1 where the token is new.

        Old positions ascend. With `moves`, tokens of moved blocks have theirs too, and the old
        positions are distinct but not in order.
        """
        positions = np.full(self.tokens_new, -1, dtype=np.int64)
        for run in (*self.runs, *(self.moves if moves else ())):
            positions[run.new_start : run.new_stop] = np.arange(run.old_start, run.old_stop)
        return positions

    def to_dict(self) -> dict[str, Any]:
        """The alignment as JSON values; runs and moves are `[old start, new start, length]`."""
        return {
            "tokens_old": self.tokens_old,
            "tokens_new": self.tokens_new,
            "prefix": self.prefix,
            "runs": [[run.old_start, run.new_start, run.length] for run in self.runs],
            "moves": [[move.old_start, move.new_start, move.length] for move in self.moves],
            "hunks": [hunk.to_dict() for hunk in self.hunks],
            "recoverable_tokens": self.recoverable_tokens,
        }


def hunks_between(runs: tuple[Run, ...], tokens_old: int, tokens_new: int) -> tuple[Hunk, ...]:
    """The gaps before, between and after `runs` (in order); a gap empty on both sides is none."""
    hunks = []
    old_at = new_at = 0
    for run in (*runs, Run(tokens_old, tokens_new, 0)):
        if (old_at, new_at) != (run.old_start, run.new_start):
            hunks.append(Hunk(old_at, run.old_start, new_at, run.new_start))
        old_at, new_at = run.old_stop, run.new_stop
    return tuple(hunks)
