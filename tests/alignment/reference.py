"""What the alignment tests share: sequences, checks, and a slow, independent reference.

The reference is plain dynamic programming over all pairs of positions, one row at a time. It
shares no code and no idea (hashes, anchors, segments) with the package.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from patchkv_agents.alignment import Alignment
from patchkv_agents.alignment.result import hunks_between
from patchkv_agents.alignment.segments import MIN_MOVE

Ints = NDArray[np.int64]


def best_cover(old: Ints, new: Ints, min_run: int, *, keep_prefix: bool) -> int:
    """Most tokens that runs of at least `min_run` can cover; O(old * new) time.

    With `keep_prefix` the common prefix is aligned first whatever its length, and a last run that
    ends both sequences may have any length: the package's definition. Without it every run has
    at least `min_run` tokens: the textbook problem (LCSk++).
    """
    start = 0
    if keep_prefix:
        while start < min(len(old), len(new)) and old[start] == new[start]:
            start += 1
    old, new = old[start:], new[start:]
    rows, columns = len(old), len(new)
    zero = np.zeros(columns + 1, dtype=np.int64)
    best = [zero] * (min_run + 1)  # best[-1 - d]: row i - d; cover of old[:i], new[:j]
    matched, ending = zero, np.full(columns + 1, -1)  # run length, best cover of a run, up to here
    everything = {0: 0}  # row -> cover of old[:row], new[:columns - (rows - row)]
    for row in range(1, rows + 1):
        equal = np.concatenate(([False], new == old[row - 1]))
        matched = np.where(equal, np.concatenate(([0], matched[:-1])) + 1, 0)
        longer = np.concatenate(([-1], ending[:-1]))
        longer = np.where(equal & (longer >= 0), longer + 1, -1)
        fresh = np.full(columns + 1, -1)
        if min_run <= columns:
            fresh[min_run:] = best[-min_run][: columns + 1 - min_run] + min_run
        ending = np.where(matched >= min_run, np.maximum(longer, fresh), -1)
        best = [*best[1:], np.maximum.accumulate(np.maximum(best[-1], ending))]
        everything[row] = int(best[-1][columns - (rows - row)]) if columns >= rows - row else 0
    answer = int(best[-1][-1])
    if keep_prefix:
        tail = 0
        while tail < min(rows, columns) and old[rows - 1 - tail] == new[columns - 1 - tail]:
            tail += 1
            answer = max(answer, everything.get(rows - tail, 0) + tail)
    return start + answer


def random_edits(
    old: Ints, edits: int, rng: np.random.Generator, *, vocabulary: int, size: int = 40
) -> Ints:
    """`old` after about `edits` insertions, deletions and replacements of up to `size` tokens."""
    pieces, at = [], 0
    for position in np.sort(rng.integers(0, len(old) + 1, edits)):
        if position < at:
            continue
        kind = rng.integers(3)
        pieces.append(old[at:position])
        at = int(position)
        if kind != 0:
            at = min(len(old), at + int(rng.integers(1, size + 1)))
        if kind != 1:
            pieces.append(rng.integers(0, vocabulary, int(rng.integers(1, size + 1))))
    return np.concatenate([*pieces, old[at:]]).astype(np.int64)


def rebuilt(alignment: Alignment, old: Ints, new: Ints) -> list[int]:
    """The new sequence from old tokens (runs, moves) and the rest of each hunk, nothing else."""
    pieces = [(run.new_start, old[run.old_start : run.old_stop]) for run in alignment.runs]
    for hunk in alignment.hunks:
        at = hunk.new_start
        for move in alignment.moves:
            if hunk.new_start <= move.new_start < hunk.new_stop:
                pieces.append((at, new[at : move.new_start]))
                pieces.append((move.new_start, old[move.old_start : move.old_stop]))
                at = move.new_stop
        pieces.append((at, new[at : hunk.new_stop]))
    return [int(token) for _, piece in sorted(pieces, key=lambda p: p[0]) for token in piece]


def assert_holds(alignment: Alignment, old: Ints, new: Ints, min_run: int) -> None:
    """Everything the docstring of `align` promises, checked without the code that made it."""
    assert (alignment.tokens_old, alignment.tokens_new) == (len(old), len(new))
    assert alignment.hunks == hunks_between(alignment.runs, len(old), len(new))
    for hunk in alignment.hunks:
        assert hunk.old_start <= hunk.old_stop and hunk.new_start <= hunk.new_stop
        if hunk.old_start < hunk.old_stop and hunk.new_start < hunk.new_stop:  # no run is too short
            assert old[hunk.old_start] != new[hunk.new_start]
            assert old[hunk.old_stop - 1] != new[hunk.new_stop - 1]
    assert list(alignment.moves) == sorted(alignment.moves, key=lambda move: move.new_start)
    for move in alignment.moves:
        a, b = old[move.old_start : move.old_stop], new[move.new_start : move.new_stop]
        assert a.tolist() == b.tolist()
    old_at = new_at = 0
    for run in alignment.runs:
        assert run.old_start >= old_at and run.new_start >= new_at and run.length >= 1
        assert (
            old[run.old_start : run.old_stop].tolist() == new[run.new_start : run.new_stop].tolist()
        )
        at_start = run.old_start == run.new_start == 0
        at_end = run.old_stop == len(old) and run.new_stop == len(new)
        assert at_start or at_end or run.length >= min_run
        old_at, new_at = run.old_stop, run.new_stop
    assert rebuilt(alignment, old, new) == new.tolist()
    used_old, used_new = np.zeros(len(old), dtype=int), np.zeros(len(new), dtype=int)
    for block in (*alignment.runs, *alignment.moves):
        used_old[block.old_start : block.old_stop] += 1
        used_new[block.new_start : block.new_stop] += 1
        assert len(old[block.old_start : block.old_stop]) == block.length
    assert used_old.max(initial=0) <= 1 and used_new.max(initial=0) <= 1
    assert all(move.length >= MIN_MOVE for move in alignment.moves)
    everywhere = alignment.position_map(moves=True)
    assert int((everywhere >= 0).sum()) == alignment.aligned_tokens + alignment.moved_tokens
    assert np.array_equal(old[everywhere[everywhere >= 0]], new[everywhere >= 0])
    positions = alignment.position_map()
    assert positions.dtype == np.int64 and positions.shape == (len(new),)
    kept = positions >= 0
    assert np.array_equal(old[positions[kept]], new[kept])
    assert (np.diff(positions[kept]) > 0).all()
    assert int(kept.sum()) == alignment.aligned_tokens


def tokens(*parts: int | range | list[int]) -> Ints:
    """One sequence from single ids, ranges and lists."""
    flat: list[int] = []
    for part in parts:
        flat.extend([part] if isinstance(part, int) else part)
    return np.array(flat, dtype=np.int64)
