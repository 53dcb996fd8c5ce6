"""Bounds on what a version can save, found without aligning it."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkv_agents.alignment import align
from patchkv_agents.checkpoint.versions import MAX_SEQUENCES, SHORTEST, OverlapIndex
from patchkv_agents.ranges import common_prefix


def slow_bound(old: list[int], new: list[int]) -> int:
    known = {tuple(old[at : at + SHORTEST]) for at in range(len(old) - SHORTEST + 1)}
    covered = set(range(common_prefix(np.array(old), np.array(new))))
    for at in range(len(new) - SHORTEST + 1):
        if tuple(new[at : at + SHORTEST]) in known:
            covered |= set(range(at, at + SHORTEST))
    return len(covered)


sequences = st.lists(st.lists(st.integers(0, 3), max_size=60), max_size=5)


@given(olds=sequences, new=st.lists(st.integers(0, 3), max_size=60))
def test_bounds_count_shared_grams_and_the_prefix(olds, new):
    index = OverlapIndex([np.array(old, dtype=np.int64) for old in olds])
    bounds = index.bounds(np.array(new, dtype=np.int64))
    assert bounds == [slow_bound(old, new) for old in olds]
    for old, bound in zip(olds, bounds, strict=True):
        runs = align(np.array(old, dtype=np.int64), np.array(new, dtype=np.int64)).runs
        counted = [r for r in runs if r.length >= SHORTEST or r.old_start == r.new_start == 0]
        aligned = sum(run.length for run in counted)
        assert aligned <= bound


def test_an_index_says_how_many_sequences_it_holds():
    with pytest.raises(ValueError, match="33"):
        OverlapIndex([np.arange(3)] * (MAX_SEQUENCES + 1))


def test_bounds_of_twenty_versions_of_8000_tokens_are_fast():
    """Measured 1 ms of CPU time."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 49152, 8000)
    versions = []
    for at in range(0, 8000, 400):
        version = base.copy()
        version[at : at + 200] = rng.integers(0, 49152, 200)
        versions.append(version)
    index = OverlapIndex(versions)
    times = []
    for _ in range(7):
        started = time.thread_time()
        bounds = index.bounds(base)
        times.append((time.thread_time() - started) * 1e3)
    assert min(times) < 4
    assert bounds == [7800] * 20
