"""Compares two lists that differ in few places."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import compress, count
from typing import Any, TypeVar

T = TypeVar("T")


def equal_ends(
    old: Sequence[T], new: Sequence[T], equal: Callable[[T, T], Any] = operator.eq
) -> tuple[int, int]:
    """Length of the common beginning, and of the common end of what is left.

    Items that are the same object are equal, and cost next to nothing.
    """
    size = min(len(old), len(new))
    head = _equal_run(old, new, size, equal)
    rest = size - head
    return head, _equal_run(old[::-1], new[::-1], rest, equal) if rest else 0


def _equal_run(old: Sequence[T], new: Sequence[T], size: int, equal: Callable[[T, T], Any]) -> int:
    differs = map(operator.is_not, old, new)
    at = min(next(compress(count(), differs), size), size)
    while at < size and (old[at] is new[at] or equal(old[at], new[at])):
        at += 1
    return at
