"""Candidate segments: maximal equal stretches of two sequences, and their best chain.

A segment lies on one diagonal (old position minus new position constant). Both functions are
vectorised; see `patchkv_agents.alignment.matching` for the whole algorithm and its cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from patchkv_agents.alignment.result import Hunk, Run
from patchkv_agents.ranges import BoolArray, ranges_of

Ints = NDArray[np.int64]

_HASH_BASE = 0x9E3779B97F4A7C15  # odd, so multiplication is invertible modulo 2**64
_PAIRS_PER_TOKEN = 2
_MIN_PAIRS = 16384
_NEVER = np.int64(-(2**62))


@dataclass(frozen=True, slots=True)
class Segments:
    """Candidate stretches, one a row, int64 `[segments]` each, sorted by (old, new) start.

    `complete` says that every pair of equal k-grams was looked at, so that nothing can be found
    in the gaps which the chain leaves.
    """

    old_start: Ints
    new_start: Ints
    length: Ints
    complete: bool


def kgram_hashes(tokens: Ints, k: int) -> NDArray[np.uint64]:
    """Polynomial hash modulo 2**64 of each k consecutive tokens, uint64 `[tokens - k + 1]`.

    Built by doubling: O(tokens * log k). Equal k-grams have equal hashes; the converse is only
    likely, so callers compare the tokens.
    """
    mixed = tokens.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)  # small ids use few bits; spread them before they are summed
    hashes, width = mixed, 1
    for bit in bin(k)[3:]:
        power = np.uint64(pow(_HASH_BASE, width, 2**64))
        hashes = hashes[:-width] * power + hashes[width:]
        width *= 2
        if bit == "1":
            hashes = hashes[:-1] * np.uint64(_HASH_BASE) + mixed[width:]
            width += 1
    return hashes


def find_segments(old: Ints, new: Ints, k: int, limit: int) -> Segments:
    """Stretches of at least k equal tokens (by hash) between `old` and `new`, at most `limit`.

    All pairs of equal k-grams are joined while there are few. Where there are many (text that
    repeats itself), the rarest k-grams are joined in full and the t-th occurrence of each other
    one is paired with the t-th, counted from the front and from the back, so the work stays
    linear. If more than `limit` segments come out, the longest are kept.
    """
    if min(len(old), len(new)) < k:
        empty = np.empty(0, dtype=np.int64)
        return Segments(empty, empty, empty, True)
    old_at, new_at, complete = _equal_kgrams(old, new, k)
    same = old[old_at] == new[new_at]
    old_at, new_at = old_at[same], new_at[same]

    # One integer a pair, ordered by diagonal, then old position: neighbours differ by one.
    row = np.int64(len(old) + 1)
    key = (new_at - old_at + len(old)) * row + old_at
    key.sort()
    step = np.diff(key)
    if not complete and len(key):  # both rank pairings may name the same pair
        key = key[np.flatnonzero(np.concatenate(([1], step)))]
        step = np.diff(key)
    first = np.flatnonzero(np.concatenate(([0], step)) != 1) if len(key) else key
    length = np.diff(np.append(first, len(key))) + (k - 1)
    if len(first) > limit:
        longest = np.argsort(-length, kind="stable")[:limit]
        first, length, complete = first[longest], length[longest], False
    old_start = key[first] % row
    new_start = key[first] // row - len(old) + old_start
    order = np.lexsort((new_start, old_start))
    return Segments(old_start[order], new_start[order], length[order], complete)


def _equal_kgrams(old: Ints, new: Ints, k: int) -> tuple[Ints, Ints, bool]:
    """Positions (old, new) of pairs of equal k-grams, and whether these are all the pairs."""
    bits = np.uint64(max(len(old), len(new)).bit_length())
    old_pos, old_value, old_first, old_count = _grouped(kgram_hashes(old, k), bits)
    new_pos, new_value, new_first, new_count = _grouped(kgram_hashes(new, k), bits)
    places = np.searchsorted(new_value, old_value)
    places[places == len(new_value)] = 0
    shared = np.flatnonzero(new_value[places] == old_value)
    of_new = places[shared]
    groups = np.stack(
        [old_first[shared], old_count[shared], new_first[of_new], new_count[of_new]], axis=1
    )

    pairs = groups[:, 1] * groups[:, 3]
    budget = max(_MIN_PAIRS, _PAIRS_PER_TOKEN * (len(old) + len(new)))
    if int(pairs.sum()) <= budget:
        old_slot, new_slot = _all_pairs(groups)
        return old_pos[old_slot], new_pos[new_slot], True
    rarest = np.argsort(pairs, kind="stable")
    take = int(np.searchsorted(np.cumsum(pairs[rarest]), budget, side="right"))
    slots = [_all_pairs(groups[rarest[:take]]), *_rank_pairs(groups[rarest[take:]])]
    old_slot = np.concatenate([pair[0] for pair in slots])
    new_slot = np.concatenate([pair[1] for pair in slots])
    return old_pos[old_slot], new_pos[new_slot], False


def _grouped(
    hashes: NDArray[np.uint64], bits: np.uint64
) -> tuple[Ints, NDArray[np.uint64], Ints, Ints]:
    """Positions ordered by (hash, position); each distinct hash; its first slot; its count.

    The position takes the place of the lowest `bits` of the hash: one plain sort, which is many
    times faster than a stable argsort.
    """
    packed = (hashes >> bits << bits) | np.arange(len(hashes), dtype=np.uint64)
    packed.sort()
    value = packed >> bits
    first = np.flatnonzero(np.concatenate(([True], value[1:] != value[:-1])))
    count = np.diff(np.append(first, len(value)))
    return (packed ^ (value << bits)).astype(np.int64), value[first], first, count


def _all_pairs(groups: Ints) -> tuple[Ints, Ints]:
    """Every (old slot, new slot) of each group row (old first, old count, new first, new count)."""
    old_first, old_count, new_first, new_count = groups.T
    group, inside = _enumerate(old_count * new_count)
    width = new_count[group]
    return old_first[group] + inside // width, new_first[group] + inside % width


def _rank_pairs(groups: Ints) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
    """The t-th occurrence with the t-th, counted from the front, and counted from the back."""
    old_first, old_count, new_first, new_count = groups.T
    group, rank = _enumerate(np.minimum(old_count, new_count))
    old_last, new_last = old_first + old_count - 1, new_first + new_count - 1
    front = old_first[group] + rank, new_first[group] + rank
    return front, (old_last[group] - rank, new_last[group] - rank)


def _enumerate(counts: Ints) -> tuple[Ints, Ints]:
    """For each group g, `counts[g]` rows: (g, 0), (g, 1), ..."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - (np.cumsum(counts) - counts)[group]


def best_chain(
    old_start: Ints, new_start: Ints, length: Ints, shortest: Ints
) -> list[tuple[int, int, int]]:
    """The chain of segments that covers most tokens, as (old start, new start, length) rows.

    Segments (sorted by old start, then new start) that overlap in one of the sequences are cut
    so that each keeps at least `shortest` tokens. Among chains of equal cover the one with fewest
    segments wins. O(segments**2), vectorised over predecessors. (Pavetic, Zuzic, Sikic, "LCSk++:
    Practical similarity metric for long strings", 2014, solves the same problem on single pairs of
    k-grams.)
    """
    count = len(length)
    if count == 0:
        return []
    old_stop, new_stop = old_start + length, new_start + length
    scale = np.int64(count + 1)  # score = covered tokens * scale - segments
    score = length * scale - 1
    spare = length - shortest  # what a later segment may still cut from this one's end
    before = np.full(count, -1, dtype=np.int64)
    cut = np.zeros(count, dtype=np.int64)  # taken from a segment's own start
    for b in range(1, count):
        overlap = np.maximum(old_stop[:b] - old_start[b], new_stop[:b] - new_start[b])
        np.maximum(overlap, 0, out=overlap)
        own = length[b] - shortest[b]
        gain = score[:b] - overlap * scale
        gain[overlap - own > spare[:b]] = _NEVER
        a = int(gain.argmax())
        if gain[a] > 0:
            score[b] += gain[a]
            before[b] = a
            cut[b] = min(overlap[a], own)
            spare[b] -= cut[b]
    chain = [int(score.argmax())]
    while before[chain[-1]] >= 0:
        chain.append(int(before[chain[-1]]))

    rows: list[tuple[int, int, int]] = []
    for at in reversed(chain):
        o, n = int(old_start[at] + cut[at]), int(new_start[at] + cut[at])
        if rows:  # what the new start does not clear comes off the end of the last row
            last_old, last_new, last_length = rows[-1]
            over = max(last_old + last_length - o, last_new + last_length - n, 0)
            rows[-1] = (last_old, last_new, last_length - over)
        rows.append((o, n, int(length[at] - cut[at])))
    return rows


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
