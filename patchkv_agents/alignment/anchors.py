"""Anchors: pairs of spans that the caller knows to be equal, such as unchanged messages."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from patchkv_agents.alignment.result import Run
from patchkv_agents.alignment.segments import Ints, best_chain

Span = tuple[int, int]
"""Tokens `[start, stop)`."""
Anchor = tuple[Span, Span]
"""A span of the old sequence and the equal span of the new one."""

_MAX_ANCHORS = 4096  # the chain of those that are out of order takes quadratic time


def anchor_runs(
    old: Ints, new: Ints, anchors: Iterable[Anchor], prefix: int, min_run: int
) -> list[Run]:
    """Runs of at least `min_run` tokens from `anchors`, after the common `prefix`, in order.

    An anchor counts only where its tokens are equal. Adjacent anchors are joined into one run. Of
    anchors that cross, those that cover the most tokens are used.
    """
    joined: list[Run] = []
    for (old_start, old_stop), (new_start, new_stop) in sorted(anchors):
        length = old_stop - old_start
        inside = 0 <= old_start < old_stop <= len(old) and 0 <= new_start < new_stop <= len(new)
        if not inside or not np.array_equal(old[old_start:old_stop], new[new_start:new_stop]):
            continue  # there is less state than messages, or a template wrote it in another way
        if joined and (joined[-1].old_stop, joined[-1].new_stop) == (old_start, new_start):
            first = joined.pop()
            joined.append(Run(first.old_start, first.new_start, first.length + length))
        else:
            joined.append(Run(old_start, new_start, length))
    runs = [run for run in _behind(joined, prefix) if run.length >= min_run]
    pairs = zip(runs, runs[1:], strict=False)
    if all(a.old_stop <= b.old_start and a.new_stop <= b.new_start for a, b in pairs):
        return runs
    runs = sorted(sorted(runs, key=lambda run: -run.length)[:_MAX_ANCHORS], key=_place)
    rows = np.array([(run.old_start, run.new_start, run.length) for run in runs], dtype=np.int64)
    shortest = np.full(len(rows), min_run, dtype=np.int64)
    return [Run(*row) for row in best_chain(rows[:, 0], rows[:, 1], rows[:, 2], shortest)]


def _behind(runs: Iterable[Run], prefix: int) -> Iterable[Run]:
    """The part of each run that comes after the prefix on both sides."""
    for run in runs:
        cut = max(0, prefix - run.old_start, prefix - run.new_start)
        yield Run(run.old_start + cut, run.new_start + cut, run.length - cut)


def _place(run: Run) -> tuple[int, int]:
    return run.old_start, run.new_start
