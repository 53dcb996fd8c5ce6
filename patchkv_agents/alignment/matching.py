"""Alignment of two token sequences.

**Problem.** Find runs of equal tokens, increasing in both sequences, that cover as many tokens as
possible. A run inside the text has at least `min_run` tokens: a shorter one is a coincidence (the
same three tokens in unrelated texts) and useless as KV state. The common prefix counts
whatever its length and always wins, because its state is exact; a common suffix counts too.
This is the "longest common subsequence in blocks of at least k" (LCSk++).

**Why no existing diff.** Myers' O(ND) is quadratic once whole passages change, knows no minimum
length and scatters single tokens over unrelated text; difflib (greedy longest block) is quadratic
to cubic and takes the wrong copy of repeated text; patience and histogram diff anchor only on
lines that are rare in the whole text, so a repeated block between two edits is lost or, worse, is
matched first. rapidfuzz and other Levenshtein codes optimise edits, not blocks.

**Algorithm.** The idea of histogram diff (anchors, rarest first) joined with sparse dynamic
programming, all of it in NumPy:

1. Cut off the common prefix and suffix (two vectorised comparisons). Where the caller passes
   anchors, those that are equal token for token are runs already, and the steps below only search
   the gaps between them. Repeated text is then matched with the right copy.
2. Hash every k-gram (k = `min_run`) of what is left, join equal ones by sorting, and merge pairs
   that follow each other on one diagonal into maximal segments. With at most two equal pairs per
   token, *all* pairs are used, so repeated text is weighed as a whole and the right copy wins. In
   more repetitive text the rarest k-grams are joined in full, the others by rank of occurrence.
3. The chain of segments that covers most tokens (dynamic programming; overlaps are cut), then
   every chosen run is compared token for token (a hash is never trusted) and grown both ways.
4. Where step 2 could not look at everything, repeat inside the gaps, within a fixed budget.
5. Grow runs until no hunk begins or ends with an equal token, and join a run to the one before it
   where an insertion or deletion can slide past it whole (appended turns end up as a hunk at the
   end, not as a far copy of the generation prompt).
6. Search the unmatched tokens of both sides for blocks that moved. Anchors can cause many of these,
   by holding short messages in place which a long one crossed; then align again without anchors.

**Cost.** O(n) for one edit, O(n log n) for several (the sorts), plus O(s**2) for s segments,
s at most 4,096; unrelated, constant, periodic or two-symbol sequences stay within a budget linear
in their length. No recursion.

**Limits.** In text that is periodic throughout and edited every few hundred tokens, occurrences
are paired by rank only, and up to a quarter of what could be aligned may be missed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any

import numpy as np

from patchkv_agents.alignment.anchors import Anchor, anchor_runs
from patchkv_agents.alignment.result import Alignment, Run, hunks_between
from patchkv_agents.alignment.segments import MIN_MOVE, Ints, best_chain, find_moves, find_segments
from patchkv_agents.errors import InputError

_MAX_SEGMENTS = 4096
_MIN_SEGMENTS = 64
_STEP_COST = 4096  # a step of the chain costs about as much as this many segment pairs
_CHAIN_WORK = 64 * 2**20  # segment pairs looked at in all, about half a second
_PASSES = 16  # tokens looked at in all, as a multiple of the sequences' length
_GAP_COST = 384  # looking at a gap costs at least as much as this many tokens
_CROSSED = 0.01  # share of the tokens that anchors may lose, by crossing, to tokens alone

_Gap = tuple[int, int, int, int]  # old start, old stop, new start, new stop


def align(
    old_ids: Any, new_ids: Any, *, min_run: int = 16, anchors: Iterable[Anchor] = ()
) -> Alignment:
    """Align two token sequences; `old_ids` and `new_ids` are `[tokens]` integer arrays or lists.

    Every run is truly equal, runs increase strictly in both sequences, and no hunk begins or ends
    with a token that is equal on both sides. Runs that touch neither the common prefix nor the
    common end have at least `min_run` tokens. Blocks found out of order are the alignment's
    `moves`. Neither argument is changed. Empty sequences are fine.

    Args:
        old_ids: the sequence whose state exists.
        new_ids: the sequence that is wanted.
        min_run: shortest run inside the text.
        anchors: spans known to be the same (`patchkv_agents.context.message_anchors`), in any
            order; they need not cover everything. Anchors that are not equal token for token, or
            that exceed a sequence, are ignored.

    Raises:
        InputError: a sequence is not one-dimensional or not of integers, or `min_run` < 1.
    """
    old, new = _as_tokens(old_ids, "old_ids"), _as_tokens(new_ids, "new_ids")
    k = _as_min_run(min_run)
    prefix = _equal_ahead(old, new)
    anchored = anchor_runs(old, new, anchors, prefix, k)
    alignment = _aligned(old, new, k, prefix, anchored)
    if not anchored:
        return replace(alignment, moves=find_moves(old, new, alignment.hunks))
    # All that is found out of order here could be in order without the anchors, at best.
    crossed = find_moves(old, new, alignment.hunks, min(k, MIN_MOVE))
    if sum(block.length for block in crossed) > _CROSSED * alignment.aligned_tokens:
        free = _aligned(old, new, k, prefix, [])
        if free.aligned_tokens * (1 - _CROSSED) > alignment.aligned_tokens:
            return replace(free, moves=find_moves(old, new, free.hunks))
    moves = tuple(block for block in crossed if block.length >= MIN_MOVE)
    return replace(alignment, moves=moves)


def _aligned(old: Ints, new: Ints, k: int, prefix: int, anchored: list[Run]) -> Alignment:
    """Runs and hunks; `anchored` are runs after the prefix that are part of every result."""
    suffix = _equal_behind(old[prefix:], new[prefix:])
    runs = [Run(0, 0, prefix)] if prefix else []
    fixed = suffix
    if prefix + suffix < min(len(old), len(new)):
        # The first tokens of the suffix stay in play: a run may be worth more than they are. So
        # do those that an anchor gives to another copy.
        fixed -= min(suffix, 2 * k)
        for run in anchored:
            if run.shift != len(new) - len(old):
                fixed = min(fixed, len(old) - run.old_stop, len(new) - run.new_stop)
        gap = prefix, len(old) - fixed, prefix, len(new) - fixed
        anchored = _grow(old, new, list(_inside(anchored, gap, k)), gap)
        gaps = _gaps_around(anchored, gap)
        runs += anchored + _interior_runs(old, new, k, gaps, corner=suffix - fixed)
        runs.sort(key=lambda run: run.old_start)
    if fixed:
        runs.append(Run(len(old) - fixed, len(new) - fixed, fixed))
    final = _tidy(old, new, runs)
    hunks = hunks_between(final, len(old), len(new))
    return Alignment(len(old), len(new), final, hunks)


def _inside(runs: Iterable[Run], gap: _Gap, k: int) -> Iterable[Run]:
    """The part of each run before the end of `gap`, if it has at least `k` tokens."""
    for run in runs:
        over = max(0, run.old_stop - gap[1], run.new_stop - gap[3])
        if run.length - over >= k:
            yield Run(run.old_start, run.new_start, run.length - over)


def _interior_runs(old: Ints, new: Ints, k: int, regions: Sequence[_Gap], corner: int) -> list[Run]:
    """Verified runs inside `regions`, of which the last ends with `corner` equal tokens."""
    runs: list[Run] = []
    gaps = [region for region in regions[:-1] if _is_wide(region, k)]
    gaps.append(regions[-1])
    tokens_left = _PASSES * (len(old) + len(new))
    chain_left = _CHAIN_WORK
    while gaps and tokens_left > 0:
        gap = gaps.pop()
        old_lo, old_hi, new_lo, new_hi = gap
        tokens_left -= old_hi - old_lo + new_hi - new_lo + _GAP_COST
        limit = max(_MIN_SEGMENTS, min(_MAX_SEGMENTS, isqrt(chain_left)))
        segments = find_segments(old[old_lo:old_hi], new[new_lo:new_hi], k, limit)
        rows = segments.old_start, segments.new_start, segments.length
        shortest = np.full(len(segments.length), k, dtype=np.int64)
        end = min(corner, old_hi - old_lo, new_hi - new_lo) if gap == regions[-1] else 0
        if end:
            place = old_hi - old_lo - end, new_hi - new_lo - end
            rows, shortest = _with_corner(rows, shortest, (*place, end))
        chain_left = max(0, chain_left - len(rows[0]) * (len(rows[0]) + _STEP_COST))
        chosen = [Run(old_lo + o, new_lo + n, size) for o, n, size in best_chain(*rows, shortest)]
        grown = _grow(old, new, chosen, gap)
        runs += grown
        if not segments.complete and grown:
            gaps += [inner for inner in _gaps_around(grown, gap) if _is_wide(inner, k)]
    return runs


def _is_wide(gap: _Gap, k: int) -> bool:
    """Whether a run of `k` tokens fits into `gap`."""
    return min(gap[1] - gap[0], gap[3] - gap[2]) >= k


def _with_corner(
    rows: tuple[Ints, Ints, Ints], shortest: Ints, corner: tuple[int, int, int]
) -> tuple[tuple[Ints, Ints, Ints], Ints]:
    """Add the segment that ends both sequences, which may have any length."""
    old_start, new_start, length = rows
    # Found as a segment already, if it is long enough: take it out, lest it count twice.
    other = old_start + length != corner[0] + corner[2]
    other |= new_start + length != corner[1] + corner[2]
    o, n, size = (
        np.append(row[other], np.int64(value)) for row, value in zip(rows, corner, strict=True)
    )
    shortest = np.append(shortest[other], np.int64(1))
    order = np.lexsort((n, o))
    return (o[order], n[order], size[order]), shortest[order]


def _grow(old: Ints, new: Ints, runs: list[Run], gap: _Gap) -> list[Run]:
    """Drop runs that are not equal token for token (hash collisions), grow the others in `gap`."""
    true = [
        run
        for run in runs
        if np.array_equal(old[run.old_start : run.old_stop], new[run.new_start : run.new_stop])
    ]
    grown: list[Run] = []
    old_at, _, new_at, _ = gap
    for at, run in enumerate(true):
        behind = _equal_behind(old[old_at : run.old_start], new[new_at : run.new_start])
        old_end, new_end = gap[1], gap[3]
        if at + 1 < len(true):
            old_end, new_end = true[at + 1].old_start, true[at + 1].new_start
        ahead = _equal_ahead(old[run.old_stop : old_end], new[run.new_stop : new_end])
        run = Run(run.old_start - behind, run.new_start - behind, behind + run.length + ahead)
        grown.append(run)
        old_at, new_at = run.old_stop, run.new_stop
    return grown


def _gaps_around(runs: list[Run], gap: _Gap) -> list[_Gap]:
    hunks: list[_Gap] = []
    old_at, old_hi, new_at, new_hi = gap
    for run in (*runs, Run(old_hi, new_hi, 0)):
        hunks.append((old_at, run.old_start, new_at, run.new_start))
        old_at, new_at = run.old_stop, run.new_stop
    return hunks


def _tidy(old: Ints, new: Ints, runs: list[Run]) -> tuple[Run, ...]:
    """Grow runs into the hunks between them; join runs where a whole run can slide to its left."""
    tidy: list[Run] = []
    old_at = new_at = 0
    for run in runs:
        if tidy:
            last = tidy[-1]
            ahead = _equal_ahead(old[old_at : run.old_start], new[new_at : run.new_start])
            old_at, new_at = old_at + ahead, new_at + ahead
            last = Run(last.old_start, last.new_start, last.length + ahead)
            tidy[-1] = last
            if _slides(old, new, last, run):
                tidy[-1] = last = Run(last.old_start, last.new_start, last.length + run.length)
                old_at, new_at = last.old_stop, last.new_stop
                continue
        behind = _equal_behind(old[old_at : run.old_start], new[new_at : run.new_start])
        run = Run(run.old_start - behind, run.new_start - behind, run.length + behind)
        tidy.append(run)
        old_at, new_at = run.old_stop, run.new_stop
    if tidy:
        last = tidy[-1]
        ahead = _equal_ahead(old[old_at:], new[new_at:])
        tidy[-1] = Run(last.old_start, last.new_start, last.length + ahead)
    return tuple(tidy)


def _slides(old: Ints, new: Ints, last: Run, run: Run) -> bool:
    """Whether the tokens of `run` also follow `last` directly, with nothing lost by saying so."""
    if last.old_stop != run.old_start and last.new_stop != run.new_start:
        return False  # a replacement, not an insertion or deletion
    old_here = old[last.old_stop : last.old_stop + run.length]
    new_here = new[last.new_stop : last.new_stop + run.length]
    return len(old_here) == len(new_here) == _equal_ahead(old_here, new_here) == run.length


def _equal_ahead(a: Ints, b: Ints) -> int:
    """Length of the common prefix of `a` and `b`, comparing in pieces that grow."""
    size = min(len(a), len(b))
    at, piece = 0, 256
    while at < size:
        stop = min(at + piece, size)
        unequal = a[at:stop] != b[at:stop]
        first = int(unequal.argmax())
        if unequal[first]:
            return at + first
        at, piece = stop, piece * 4
    return size


def _equal_behind(a: Ints, b: Ints) -> int:
    """Length of the common suffix of `a` and `b`."""
    return _equal_ahead(a[::-1], b[::-1])


def _as_tokens(ids: Any, name: str) -> Ints:
    try:
        tokens = np.asarray(ids)
    except (ValueError, TypeError) as error:
        raise InputError(f"{name} is not an array of token ids: {error}") from error
    if tokens.ndim != 1:
        raise InputError(
            f"{name} has {tokens.ndim} dimensions {tokens.shape}; pass one sequence of token ids "
            "of shape [tokens], for a batch one row at a time"
        )
    if tokens.size and tokens.dtype.kind not in "iu":
        raise InputError(f"{name} holds {tokens.dtype}, not integers; pass token ids")
    return tokens.astype(np.int64, copy=False)


def _as_min_run(min_run: int) -> int:
    try:
        value = operator.index(min_run)
    except TypeError as error:
        raise InputError(f"min_run is {min_run!r}; pass a whole number of tokens") from error
    if value < 1:
        raise InputError(f"min_run is {value}; a run has at least 1 token")
    return value
