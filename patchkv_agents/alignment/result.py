"""The alignment of two token sequences: runs, hunks, moves, prefix, position map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patchkv_agents.errors import InputError


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

    def check(self, old: NDArray[np.int64], new: NDArray[np.int64]) -> None:
        """Compare every claim of this alignment with the two sequences (`[tokens]`, integers).

        Raises:
            InputError: a run is empty, out of order or not equal token for token, it could be
                made longer at one end, runs and hunks do not tile both sequences, or a move is
                not equal, not inside a hunk on either side, or shares a token with another.
        """
        if (len(old), len(new)) != (self.tokens_old, self.tokens_new):
            raise _mismatch(f"it is for {self.tokens_old} and {self.tokens_new} tokens")
        if hunks_between(self.runs, self.tokens_old, self.tokens_new) != self.hunks:
            raise _mismatch("its hunks are not the gaps between its runs")
        for run in (*self.runs, *self.moves):
            same = np.array_equal(
                old[run.old_start : run.old_stop], new[run.new_start : run.new_stop]
            )
            if run.length < 1 or run.old_start < 0 or run.new_start < 0 or not same:
                raise _mismatch(f"{run} does not cover equal tokens")
        for hunk in self.hunks:
            if hunk.old_start > hunk.old_stop or hunk.new_start > hunk.new_stop:
                raise _mismatch(f"the runs around {hunk} are out of order or overlap")
            if hunk.old_start == hunk.old_stop or hunk.new_start == hunk.new_stop:
                continue
            first = old[hunk.old_start] == new[hunk.new_start]
            if first or old[hunk.old_stop - 1] == new[hunk.new_stop - 1]:
                raise _mismatch(f"{hunk} begins or ends with an equal token: a run is too short")
        self._check_moves()

    def _check_moves(self) -> None:
        free_old = np.zeros(self.tokens_old, dtype=bool)
        free_new = np.zeros(self.tokens_new, dtype=bool)
        for hunk in self.hunks:
            free_old[hunk.old_start : hunk.old_stop] = True
            free_new[hunk.new_start : hunk.new_stop] = True
        for move in self.moves:
            old_side = free_old[move.old_start : move.old_stop]
            new_side = free_new[move.new_start : move.new_stop]
            if not (old_side.all() and new_side.all()):
                raise _mismatch(f"{move} is not inside hunks, or overlaps another move")
            old_side[:], new_side[:] = False, False
        if list(self.moves) != sorted(self.moves, key=lambda move: move.new_start):
            raise _mismatch("its moves are not in the order of the new sequence")


def hunks_between(runs: tuple[Run, ...], tokens_old: int, tokens_new: int) -> tuple[Hunk, ...]:
    """The gaps before, between and after `runs` (in order); a gap empty on both sides is none."""
    hunks = []
    old_at = new_at = 0
    for run in (*runs, Run(tokens_old, tokens_new, 0)):
        if (old_at, new_at) != (run.old_start, run.new_start):
            hunks.append(Hunk(old_at, run.old_start, new_at, run.new_start))
        old_at, new_at = run.old_stop, run.new_stop
    return tuple(hunks)


def _mismatch(what: str) -> InputError:
    return InputError(
        f"this alignment does not describe these two sequences: {what}; "
        "align the sequences that are in use again"
    )
