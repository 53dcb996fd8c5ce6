"""Writers that die, disks that are full, servers that die or hang."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchkv_agents.checkpoint.stores import BlobCheckpointStore
from patchkv_agents.checkpoint.stores.conformance import (
    KEY,
    assert_same,
    sample_checkpoint,
    sample_payload,
)
from patchkv_agents.checkpoint.stores.objects import open_objects
from patchkv_agents.checkpoint.stores.redis import RedisBlobs, open_redis
from patchkv_agents.errors import CheckpointError
from tests.checkpoint.stores import writing
from tests.checkpoint.stores.blobs import DictBlobs, Full, Killed, KilledAt
from tests.checkpoint.stores.servers import RedisServer, redis_server, silent_server

OTHER = replace(KEY, version="version-2")


@contextmanager
def seconds_at_most(limit: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < limit


def test_a_writer_that_dies_leaves_each_version_whole_or_absent() -> None:
    """Stopped after each of its actions in turn, while it replaces one version and adds one."""
    shared = sample_payload(97)
    before = sample_checkpoint([shared])
    after = {
        KEY: sample_checkpoint([shared, sample_payload(33, 1)], 1),
        OTHER: sample_checkpoint([sample_payload(33, 2)], 2),
    }
    outcomes = set()
    killed, actions = True, 0
    while killed:
        blobs = DictBlobs()
        writer = BlobCheckpointStore(blobs, workers=1)
        writer.save(KEY, before)
        blobs.before = KilledAt(actions)
        try:
            for key, checkpoint in after.items():
                writer.save(key, checkpoint)
            killed = False
        except Killed:
            actions += 1
        blobs.before = lambda action, name: None
        reader = BlobCheckpointStore(blobs, grace_s=0.0)
        first, second = reader.load(KEY), reader.load(OTHER)
        assert first is not None
        replaced = len(first) != len(before)
        assert_same(after[KEY] if replaced else before, first)
        if second is not None:
            assert_same(after[OTHER], second)
        outcomes.add((replaced, second is not None))
        # What the writer left is found and removed, and nothing else.
        reader.sweep()
        again = BlobCheckpointStore(blobs)
        assert_same(first, again.load(KEY))
        rows = len(first) - 1 + (0 if second is None else len(second) - 1)
        assert sum(len(blobs.data[n]) for n in blobs.of_kind("part")) == rows * 2 * 3 * 3 * 32
    assert outcomes == {(False, False), (True, False), (True, True)}
    assert actions > 10


def test_a_full_store_keeps_what_it_had_and_no_half_of_the_rest() -> None:
    checkpoint = sample_checkpoint([sample_payload(97)])
    blobs = DictBlobs()
    BlobCheckpointStore(blobs).save(KEY, checkpoint)
    had = dict(blobs.data)
    for allowed in range(len(had)):
        blobs.before = Full(allowed)
        writer = BlobCheckpointStore(blobs)
        with pytest.raises(CheckpointError, match="no space"):
            writer.save(OTHER, sample_checkpoint([sample_payload(97, 1)], 1))
        assert blobs.data == had
    blobs.before = lambda action, name: None
    assert_same(checkpoint, BlobCheckpointStore(blobs).load(KEY))


@pytest.fixture(scope="module")
def forkserver() -> Any:
    """Starts children in milliseconds: they are forked from a process that has all imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([writing.__name__])
    return context


def kill_writers(forkserver: Any, folder: Path, kills: int) -> None:
    """Kill so many writers; on a machine so busy that they write too little, later and more."""
    rng = random.Random(0)
    known = []
    for number in range(10 * kills):
        receiver, sender = forkserver.Pipe(duplex=False)
        seed = number * writing.VERSIONS
        child = forkserver.Process(
            target=writing.write_until_killed, args=(str(folder), seed, sender)
        )
        child.start()
        assert receiver.poll(60) and receiver.recv() == "started"
        time.sleep(rng.uniform(0.0, 0.06) * max(1.0, number / kills))
        child.kill()
        child.join()
        known += [writing.sample(seed + n) for n in range(writing.VERSIONS)]
        store = BlobCheckpointStore(open_objects(folder))
        for version in range(writing.VERSIONS):
            loaded = store.load(replace(KEY, version=f"version-{version}"))
            if loaded is not None:
                (same,) = [c for c in known if (c.token_ids == loaded.token_ids).all()]
                assert_same(same, loaded)
        survivors = store.stats().checkpoints
        if number + 1 >= kills and survivors == writing.VERSIONS:
            break
    assert survivors == writing.VERSIONS, "the writers lived too short to write anything"
    BlobCheckpointStore(open_objects(folder), grace_s=0.0).sweep()
    size = known[0].payload_bytes
    left = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert left < survivors * size * 1.1


def test_killed_writers(forkserver: Any, tmp_path: Path) -> None:
    kill_writers(forkserver, tmp_path, kills=10)


@pytest.mark.slow
def test_many_killed_writers(forkserver: Any, tmp_path: Path) -> None:
    kill_writers(forkserver, tmp_path, kills=200)


def test_a_file_size_limit_is_an_error_with_the_reason(forkserver: Any, tmp_path: Path) -> None:
    receiver, sender = forkserver.Pipe(duplex=False)
    child = forkserver.Process(
        target=writing.write_with_small_files, args=(str(tmp_path), 100_000, sender)
    )
    child.start()
    assert receiver.poll(60)
    assert "File too large" in receiver.recv()
    child.join()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_full_disk_is_an_error_with_the_reason(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(tmp_path)]
    if os.name != "posix" or os.geteuid() != 0 or subprocess.run(mount).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        store = BlobCheckpointStore(open_objects(tmp_path), part_bytes=1 << 18)
        store.save(KEY, writing.sample(0))
        with pytest.raises(CheckpointError, match="No space left"):
            store.save(OTHER, writing.sample(1))
        reader = BlobCheckpointStore(open_objects(tmp_path))
        assert reader.load(OTHER) is None
        assert_same(writing.sample(0), reader.load(KEY))
        # Nothing of the failed save holds space: something smaller still fits.
        store.save(OTHER, sample_checkpoint([sample_payload(423)]))
        assert reader.load(OTHER) is not None
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


class KillingBlobs(RedisBlobs):
    """Kills its server right before the `left`-th action."""

    def __init__(self, server: RedisServer, left: int) -> None:
        inner = open_redis(server.url, timeout_s=2.0)
        super().__init__(inner._client, 1000, "patchkv/")
        self.server = server
        self.left = left

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.server.kill()

    def get(self, name: str) -> memoryview | None:
        self._count()
        return super().get(name)

    def put(self, name: str, data: bytes) -> None:
        self._count()
        super().put(name, data)


@pytest.mark.parametrize("action", ["load", "save"])
@pytest.mark.parametrize("left", [1, 2, 4])
def test_a_redis_that_dies_is_an_error_and_no_hang(action: str, left: int) -> None:
    checkpoint = sample_checkpoint([sample_payload(423, shape=(4, 9, 8))])
    with redis_server() as server:
        BlobCheckpointStore(open_redis(server.url), part_bytes=1 << 16).save(KEY, checkpoint)
        store = BlobCheckpointStore(KillingBlobs(server, left), part_bytes=1 << 16)
        with seconds_at_most(5), pytest.raises(CheckpointError, match="Redis checkpoint store"):
            if action == "load":
                store.load(KEY)
            else:
                store.save(OTHER, sample_checkpoint([sample_payload(423, 1, shape=(4, 9, 8))]))
        with seconds_at_most(5), pytest.raises(CheckpointError):
            store.load(KEY)


def test_a_redis_killed_at_any_time_during_a_load() -> None:
    """The server dies in the middle of an answer."""
    checkpoint = sample_checkpoint([sample_payload(423, shape=(32, 9, 64))])
    with redis_server() as server:
        BlobCheckpointStore(open_redis(server.url)).save(KEY, checkpoint)
        store = BlobCheckpointStore(open_redis(server.url, timeout_s=2.0))
        killer = threading.Timer(0.02, server.kill)
        with seconds_at_most(5), pytest.raises(CheckpointError):
            killer.start()
            while True:  # until a load meets the kill
                assert_same(checkpoint, store.load(KEY))
                store = BlobCheckpointStore(open_redis(server.url, timeout_s=2.0))
        killer.join()


def test_a_redis_without_memory_left_is_an_error() -> None:
    with redis_server() as server:
        store = BlobCheckpointStore(open_redis(server.url))
        store._blobs._client.config_set("maxmemory", 2_000_000)  # type: ignore[attr-defined]
        with pytest.raises(CheckpointError, match="memory"):
            store.save(KEY, sample_checkpoint([sample_payload(423, shape=(32, 9, 64))]))
        assert store.load(KEY) is None


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_a_server_that_never_answers_is_an_error_in_time(kind: str) -> None:
    with silent_server() as port:
        if kind == "redis":
            blobs: Any = open_redis(f"redis://127.0.0.1:{port}/0", timeout_s=0.1)
        else:
            blobs = open_objects(
                "s3://bucket",
                timeout_s=0.1,
                endpoint=f"http://127.0.0.1:{port}",
                region="nowhere",
                skip_signature=True,
                client_options={"allow_http": True},
            )
        store = BlobCheckpointStore(blobs)
        checkpoint = sample_checkpoint([sample_payload(3)])
        for call in (
            lambda: store.load(KEY),
            lambda: store.open(KEY),
            lambda: store.save(KEY, checkpoint),
            lambda: store.delete(KEY),
            lambda: store.delete_thread("tenant", "thread"),
            lambda: store.versions("model-1", "tenant", "thread", ""),
            lambda: store.stats(),
        ):
            with seconds_at_most(3), pytest.raises(CheckpointError, match="failed in the"):
                call()


def test_a_load_that_takes_too_long_is_an_error_in_time() -> None:
    """A server that sends a byte now and then is within every limit for a single wait."""
    stop = threading.Event()

    def hold_up(action: str, name: str) -> None:
        if action == "get" and "part-" in name:
            stop.wait(10)

    blobs = DictBlobs()
    BlobCheckpointStore(blobs).save(KEY, sample_checkpoint([sample_payload(97)]))
    blobs.before = hold_up
    store = BlobCheckpointStore(blobs, load_timeout_s=0.3)
    try:
        with seconds_at_most(3), pytest.raises(CheckpointError, match="load_timeout_s"):
            store.load(KEY)
    finally:
        stop.set()
