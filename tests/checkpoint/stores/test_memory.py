"""Budgets and quotas of the memory store."""

from __future__ import annotations

from dataclasses import replace

from patchkv_agents.checkpoint.stores import CheckpointKey, MemoryStore
from patchkv_agents.checkpoint.stores.conformance import KEY, sample_checkpoint, sample_payload

SIZE = 2 * 3 * 3 * 64 * 8 * 4 + 8 * 5 + 65 * 14
"""Bytes of a checkpoint of 64 rows: keys and values, block table, token arrays."""


def keys(number: int, thread: str = "thread") -> list[CheckpointKey]:
    return [replace(KEY, thread=thread, version=f"version-{n}") for n in range(number)]


def held(store: MemoryStore, candidates: list[CheckpointKey]) -> list[int]:
    """Indexes of the candidates that the store has; changes neither order nor counts."""
    found = {
        key for c in candidates for key in store.versions(c.fingerprint, c.tenant, c.thread, "")
    }
    return [index for index, key in enumerate(candidates) if key in found]


def test_the_longest_unused_go_beyond_the_budget() -> None:
    store = MemoryStore(budget_bytes=3 * SIZE)
    versions = keys(5)
    for number, key in enumerate(versions[:3]):
        store.save(key, sample_checkpoint([sample_payload(64, number)]))
    assert store.stats().stored_bytes == 3 * SIZE
    assert held(store, versions) == [0, 1, 2]
    store.load(versions[0])
    for number, key in enumerate(versions[3:]):
        store.save(key, sample_checkpoint([sample_payload(64, 3 + number)]))
    assert held(store, versions) == [0, 3, 4]
    stats = store.stats()
    assert (stats.evictions, stats.stored_bytes) == (2, 3 * SIZE)


def test_shared_payload_counts_once() -> None:
    store = MemoryStore(budget_bytes=2 * SIZE)
    versions, payload = keys(10), sample_payload(64)
    for key in versions:
        store.save(key, sample_checkpoint([payload]))
    assert held(store, versions) == list(range(10))
    assert store.stats().stored_bytes == SIZE + 9 * 65 * 14


def test_a_thread_keeps_to_its_quota_and_leaves_others_alone() -> None:
    store = MemoryStore(thread_budget_bytes=2 * SIZE)
    quiet, busy = keys(2, "quiet"), keys(6, "busy")
    for number, key in enumerate(quiet + busy):
        store.save(key, sample_checkpoint([sample_payload(64, number)]))
    assert held(store, quiet) == [0, 1]
    assert held(store, busy) == [4, 5]
    same_id = replace(busy[0], tenant="other")
    store.save(same_id, sample_checkpoint([sample_payload(64, 9)]))
    assert held(store, busy) == [4, 5]


def test_what_was_saved_last_stays() -> None:
    store = MemoryStore(budget_bytes=10)
    versions = keys(2)
    for number, key in enumerate(versions):
        store.save(key, sample_checkpoint([sample_payload(64, number)]))
    assert held(store, versions) == [1]


def test_loads_give_the_object_itself() -> None:
    store = MemoryStore()
    checkpoint = sample_checkpoint([sample_payload(3)])
    store.save(KEY, checkpoint)
    assert store.load(KEY) is checkpoint
