"""Budgets, numbers of versions, expiry and garbage of stores of blobs."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from patchkv_agents.checkpoint.key import CheckpointKey
from patchkv_agents.checkpoint.stores import BlobCheckpointStore, MemoryStore, open_store
from patchkv_agents.checkpoint.stores.conformance import (
    KEY,
    assert_same,
    sample_checkpoint,
    sample_payload,
)
from patchkv_agents.checkpoint.stores.objects import open_objects
from patchkv_agents.checkpoint.stores.redis import open_redis
from tests.checkpoint.stores.blobs import DictBlobs


def keys(number: int, thread: str = "thread") -> list[CheckpointKey]:
    return [replace(KEY, thread=thread, version=f"version-{n}") for n in range(number)]


def save(store: BlobCheckpointStore, key: CheckpointKey, seed: int) -> None:
    store.save(key, sample_checkpoint([sample_payload(64, seed)]))


def held(store: BlobCheckpointStore, candidates: list[CheckpointKey]) -> list[int]:
    found = {
        key for c in candidates for key in store.versions(c.fingerprint, c.tenant, c.thread, "")
    }
    return [index for index, key in enumerate(candidates) if key in found]


def test_the_longest_unused_go_beyond_the_budget(tmp_path: Path) -> None:
    versions = keys(2, "one") + keys(3, "two")
    probe = BlobCheckpointStore(open_objects(tmp_path / "probe"))
    save(probe, KEY, 0)
    budget = 3 * probe.stats().stored_bytes + 100  # manifests differ by some bytes
    store = open_store(tmp_path / "store", budget_bytes=budget)
    assert isinstance(store, BlobCheckpointStore)
    for number, key in enumerate(versions[:3]):
        save(store, key, number)
        time.sleep(0.01)  # file systems keep times in steps of some milliseconds
    assert held(store, versions) == [0, 1, 2]
    assert store.load(versions[0]) is not None
    for number, left in ((3, [0, 2, 3]), (4, [0, 3, 4])):
        time.sleep(0.01)
        save(store, versions[number], number)
        assert held(store, versions) == left
        assert store.stats().stored_bytes <= budget
    assert store.stats().evictions == 2


def test_evicting_a_version_leaves_what_others_share() -> None:
    blobs = DictBlobs()
    shared = sample_payload(64)
    store = BlobCheckpointStore(blobs, keep_versions=2)
    for number, key in enumerate(keys(4)):
        blobs.modified_s = {name: t - 10 for name, t in blobs.modified_s.items()}
        store.save(key, sample_checkpoint([shared, sample_payload(33, 1 + number)]))
    assert held(store, keys(4)) == [2, 3]
    fresh = BlobCheckpointStore(blobs)
    for number in (2, 3):
        expected = sample_checkpoint([shared, sample_payload(33, 1 + number)])
        assert_same(expected, fresh.load(keys(4)[number]))
    payloads = 64 + 2 * 33
    assert sum(len(blobs.data[name]) for name in blobs.of_kind("part")) == payloads * 2 * 3 * 3 * 32


def test_versions_of_other_namespaces_do_not_count() -> None:
    store = BlobCheckpointStore(DictBlobs(), keep_versions=1)
    others = [replace(KEY, namespace=f"agent-{n}") for n in range(3)]
    for number, key in enumerate(others):
        save(store, key, number)
    assert all(store.load(key) is not None for key in others)


def test_a_sweep_removes_old_garbage_and_no_work_in_progress() -> None:
    blobs = DictBlobs()
    store = BlobCheckpointStore(blobs, grace_s=100)
    save(store, KEY, 0)
    whole = dict(blobs.data)
    folder = blobs.of_kind("manifest")[0].rsplit("/", 1)[0]
    for name in ("part-1234-0", "arrays-1-2-3"):
        blobs.put(f"{folder}/{name}", b"garbage")
        blobs.put(f"other/thread/{name}", b"garbage")
    store.sweep()
    assert len(blobs.data) == len(whole) + 4
    blobs.modified_s = {name: t - 101 for name, t in blobs.modified_s.items()}
    blobs.put(f"{folder}/part-5678-0", b"being written")
    store.sweep()
    assert blobs.data == {**whole, f"{folder}/part-5678-0": b"being written"}


def test_a_sweep_removes_half_written_files(tmp_path: Path) -> None:
    store = BlobCheckpointStore(open_objects(tmp_path), grace_s=100)
    save(store, KEY, 0)
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    old, new = (next(iter(files)).with_name(f"part-{n}-0#1") for n in (1, 2))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 101,) * 2)
    store.sweep()
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == files | {new}


def test_a_sweep_removes_versions_that_expired() -> None:
    blobs = DictBlobs()
    store = BlobCheckpointStore(blobs, expire_s=1000)
    old, new = keys(2)
    for number, key in enumerate((old, new)):
        save(store, key, number)
    blobs.modified_s = {name: t - 999 for name, t in blobs.modified_s.items()}
    store.sweep()
    assert held(store, [old, new]) == [0, 1]
    store.load(new)  # in use again
    blobs.modified_s = {name: t - 2 for name, t in blobs.modified_s.items()}
    store.sweep()
    assert held(store, [old, new]) == [1]
    assert len(blobs.of_kind("part")) == len(blobs.data) - 2


def test_forgetting_also_removes_what_nobody_refers_to() -> None:
    """The version that held the text may be gone already, evicted, or its manifest damaged."""
    blobs = DictBlobs()
    store = BlobCheckpointStore(blobs)
    first, second = keys(2)
    save(store, first, 0)
    save(store, second, 1)
    (damaged,) = [n for n in blobs.of_kind("manifest") if b'"version-0"' in blobs.data[n]]
    blobs.data[damaged] = b"damaged"
    store.delete(second)
    assert blobs.data == {}


def test_redis_values_expire_unless_they_are_used(redis_url: str) -> None:
    blobs = open_redis(redis_url, prefix="expiry/", expire_s=1000)
    shared = sample_payload(64)
    first, second = keys(2)
    store = BlobCheckpointStore(blobs)
    store.save(first, sample_checkpoint([shared]))
    client = blobs._client

    def age() -> None:
        for key in client.scan_iter("expiry/*"):
            client.expire(key, 10)

    def fresh() -> set[str]:
        return {
            key.decode().rsplit("/", 1)[-1].split("-")[0]
            for key in client.scan_iter("expiry/*")
            if client.ttl(key) > 900
        }

    assert fresh() == {"manifest", "arrays", "part"}
    age()
    assert fresh() == set()
    store.save(second, sample_checkpoint([shared]))
    assert client.ttl(b"expiry/" + blobs.list_blobs()[0].name.encode()) > 0
    assert fresh() == {"manifest", "arrays", "part"}  # the shared part among them
    age()
    BlobCheckpointStore(blobs).load(first)
    assert fresh() == {"manifest", "arrays", "part"}


@pytest.mark.parametrize("location", ["memory:", "memory:///"])
def test_memory_by_address(location: str) -> None:
    assert isinstance(open_store(location, budget_bytes=10), MemoryStore)


def test_addresses(tmp_path: Path, redis_url: str) -> None:
    for location in (tmp_path, str(tmp_path / "a b"), (tmp_path / "ü%").as_uri(), redis_url):
        store = open_store(location)
        save(store, KEY, 0)  # type: ignore[arg-type]
        assert_same(sample_checkpoint([sample_payload(64)]), open_store(location).load(KEY))
    assert any((tmp_path / "a b").iterdir()) and any((tmp_path / "ü%").iterdir())
