"""Lists encoded as their differences from another list.

Versions of a context differ from their parents in few messages. A store saves only these and their
places, so that 1,000 versions of 200 messages are not 200,000 references.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from patchkv_agents.context.sequences import equal_ends

T = TypeVar("T", bound=Hashable)
Splice = tuple[int, int, tuple[T, ...]]
"""`(start, stop, items)`: the items stand in the place of `old[start:stop]`."""

LONGEST_CHAIN = 32
"""Longest chain of versions encoded by splices; a full list follows, to keep reads fast."""


def splices(old: Sequence[T], new: Sequence[T]) -> tuple[Splice[T], ...]:
    """The splices that turn `old` into `new`, in order. Linear time, not always the fewest."""
    head, tail = equal_ends(old, new)
    old_stop, new_stop = len(old) - tail, len(new) - tail
    if head in (old_stop, new_stop):
        whole = (head, old_stop, tuple(new[head:new_stop]))
        return (whole,) if head < max(old_stop, new_stop) else ()
    places: dict[T, list[int]] = {}
    for i in range(head, old_stop):
        places.setdefault(old[i], []).append(i)
    changes: list[Splice[T]] = []
    at = head
    added: list[T] = []
    for item in new[head:new_stop]:
        candidates = places.get(item, [])
        nearest = bisect_left(candidates, at)
        if nearest == len(candidates):
            added.append(item)
            continue
        if added or candidates[nearest] > at:
            changes.append((at, candidates[nearest], tuple(added)))
        at, added = candidates[nearest] + 1, []
    if added or at < old_stop:
        changes.append((at, old_stop, tuple(added)))
    return tuple(changes)


def spliced(old: Sequence[T], changes: Iterable[Splice[T]]) -> tuple[T, ...]:
    """The list that results from applying `changes` to `old`."""
    result: list[T] = []
    at = 0
    for start, stop, items in changes:
        result += old[at:start]
        result += items
        at = stop
    return (*result, *old[at:])
