"""Checkpoints of several versions side by side: budget, order, shared payload."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from patchkv_agents.checkpoint import Checkpoint, CheckpointVersions, MemoryBudget
from patchkv_agents.checkpoint.extents import extents_of, moved_extents
from patchkv_agents.checkpoint.versions import MAX_VERSIONS

from .rows import scaled_payload, stored_rows


def checkpoint(token_ids, extents=(), origins=None) -> Checkpoint:
    token_ids = np.array(token_ids, dtype=np.int64)
    origins = np.zeros(len(token_ids), np.int16) if origins is None else np.array(origins, np.int16)
    return Checkpoint(token_ids, origins, np.zeros(len(token_ids), np.float32), tuple(extents))


def test_the_least_recently_used_version_goes_first_and_the_newest_never():
    one = scaled_payload([8], [0]).nbytes
    versions = CheckpointVersions(MemoryBudget(3 * one))
    for name in "abc":
        fresh = extents_of(scaled_payload([8], [0]), [0])
        assert len(versions.put(name, checkpoint(range(8), fresh))) == 8
    versions.touch("a")
    fresh = extents_of(scaled_payload([8], [0]), [0])
    versions.put("d", checkpoint(range(8), fresh))
    assert list(versions) == ["a", "d"]  # down to three quarters of the budget
    small = CheckpointVersions(MemoryBudget(1))
    for name in "ab":
        small.put(name, checkpoint(range(8), fresh))
    assert list(small) == ["b"]


def test_rows_that_no_version_needs_go_before_versions_do():
    """Versions are dropped for live payload only; the rest is copied together first."""
    payload = scaled_payload([4] * 25, list(range(0, 100, 4)))
    whole = extents_of(payload, list(range(0, 100, 4)))
    versions = CheckpointVersions(MemoryBudget(payload.nbytes))
    for name in "ab":  # 60 of 100 rows: more than half
        versions.put(name, checkpoint(range(60), moved_extents(whole, np.arange(60))))
    assert versions.get("a").extents[0].payload is payload
    fresh = extents_of(scaled_payload([4], [0]), [0])
    versions.put("c", checkpoint(range(4), fresh))
    assert list(versions) == ["a", "b", "c"]
    assert versions.payload_bytes < payload.nbytes * 0.7


def test_shared_payload_counts_once_against_the_budget():
    payload = scaled_payload([8], [0])
    versions = CheckpointVersions(MemoryBudget(payload.nbytes))
    for name in "abc":
        versions.put(name, checkpoint(range(8), extents_of(payload, [0])))
    assert list(versions) == ["a", "b", "c"]
    assert versions.payload_bytes == payload.nbytes
    for name in range(2 * MAX_VERSIONS):
        versions.put(str(name), checkpoint(range(8), extents_of(payload, [0])))
    assert len(versions) == MAX_VERSIONS


def test_what_no_version_refers_to_any_more_is_given_back():
    """A payload of which under half is left shrinks to that, in every version alike."""
    payload = scaled_payload([4] * 25, list(range(0, 100, 4)))
    whole = extents_of(payload, list(range(0, 100, 4)))
    versions = CheckpointVersions()
    versions.put("whole", checkpoint(range(100), whole))
    few = checkpoint(range(10), moved_extents(whole, np.arange(60, 70)))
    before = stored_rows(few, np.arange(10))
    assert versions.put("few", few).extents[0].payload is payload
    versions.drop(["whole", "unknown"])
    kept = versions.put("few", few)
    assert kept is versions.get("few")
    assert versions.payload_bytes < payload.nbytes / 5
    assert stored_rows(kept, np.arange(10)) == before


def test_a_copy_goes_its_own_way():
    payload = scaled_payload([8], [0])
    versions = CheckpointVersions()
    versions.put("a", checkpoint(range(8), extents_of(payload, [0])))
    copy = versions.copy()
    copy.put("b", checkpoint(range(9)))
    copy.drop(["a"])
    assert list(versions) == ["a"] and list(copy) == ["b"]
    assert [name for _, name in versions.ranked(np.arange(9))] == ["a"]


def test_versions_are_ranked_by_what_they_can_save():
    base = np.arange(100)
    versions = CheckpointVersions()
    versions.put("behind", checkpoint(np.concatenate([base[:60], base[:60] + 500])))
    versions.put("middle", checkpoint(np.concatenate([[900], base])))
    versions.put("unrelated", checkpoint(base + 500))
    assert versions.ranked(base) == [(100, "middle"), (60, "behind"), (0, "unrelated")]


def test_an_exact_recovery_counts_exact_stored_rows_of_the_prefix_only():
    base = np.arange(100)
    payload = scaled_payload([100], [0])
    origins = np.where(np.arange(100) % 10 == 0, -3, 0)
    versions = CheckpointVersions()
    quantised = checkpoint(base, extents_of(payload, [0]), origins)
    versions.put("quantised", quantised)
    versions.put("unstored", replace(quantised, extents=quantised.extents[0:0]))
    assert versions.ranked(base[:50], exact=True) == [(45, "quantised"), (0, "unstored")]
