"""Checkpoints in the memory of this process."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable

from patchkv_agents.checkpoint.checkpoint import Checkpoint
from patchkv_agents.checkpoint.key import CheckpointKey
from patchkv_agents.checkpoint.stores.base import (
    CheckpointLoad,
    StoreStats,
    UsedRows,
    without_dead_rows,
)


class MemoryStore:
    """A store that holds checkpoints by reference and evicts the least recently used.

    A payload that several versions share counts once. The checkpoint saved last stays even where
    it exceeds a limit by itself: the caller holds it anyway.

    Args:
        budget_bytes: of all checkpoints together; None for no limit.
        thread_budget_bytes: the same for each thread (of a tenant) alone.
    """

    def __init__(
        self, budget_bytes: int | None = None, thread_budget_bytes: int | None = None
    ) -> None:
        self._budget_bytes = budget_bytes
        self._thread_budget_bytes = thread_budget_bytes
        self._checkpoints: OrderedDict[CheckpointKey, Checkpoint] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._lock = threading.RLock()

    def save(self, key: CheckpointKey, checkpoint: Checkpoint) -> None:
        """Keep a reference to `checkpoint`, and evict others where a limit is exceeded."""
        with self._lock:
            self._checkpoints[key] = checkpoint
            self._checkpoints.move_to_end(key)
            of_thread = [k for k in self._checkpoints if _same_thread(k, key)]
            self._evict(of_thread, self._thread_budget_bytes)
            self._evict(list(self._checkpoints), self._budget_bytes)

    def load(self, key: CheckpointKey) -> Checkpoint | None:
        """The object that was saved."""
        with self._lock:
            checkpoint = self._checkpoints.get(key)
            if checkpoint is not None:
                self._checkpoints.move_to_end(key)
            self._counts["misses" if checkpoint is None else "hits"] += 1
            return checkpoint

    def open(self, key: CheckpointKey) -> CheckpointLoad | None:
        """As `load`; all rows are there at once."""
        checkpoint = self.load(key)
        return None if checkpoint is None else CheckpointLoad(checkpoint)

    def versions(
        self, fingerprint: str | None, tenant: str, thread: str, namespace: str
    ) -> list[CheckpointKey]:
        """The stored versions of a thread, least recently used first."""
        wanted = (tenant, thread, namespace)
        with self._lock:
            return [
                key
                for key in self._checkpoints
                if (key.tenant, key.thread, key.namespace) == wanted
                and fingerprint in (None, key.fingerprint)
            ]

    def delete(self, key: CheckpointKey) -> None:
        """Delete a version (see `CheckpointStore.delete`)."""
        with self._lock:
            self._checkpoints.pop(key, None)
            of_thread = {k: c for k, c in self._checkpoints.items() if _same_thread(k, key)}
            staying = without_dead_rows({k: _used(c) for k, c in of_thread.items()})
            for gone in of_thread.keys() - staying:
                del self._checkpoints[gone]

    def delete_thread(self, tenant: str, thread: str) -> None:
        """Delete everything of a thread."""
        with self._lock:
            for key in list(self._checkpoints):
                if (key.tenant, key.thread) == (tenant, thread):
                    del self._checkpoints[key]

    def stats(self) -> StoreStats:
        """Counts and sizes."""
        with self._lock:
            return StoreStats(
                checkpoints=len(self._checkpoints),
                stored_bytes=_bytes_of(self._checkpoints.values()),
                hits=self._counts["hits"],
                misses=self._counts["misses"],
                evictions=self._counts["evictions"],
            )

    def close(self) -> None:
        """Nothing to release."""

    def _evict(self, keys: list[CheckpointKey], budget_bytes: int | None) -> None:
        """Evict the least recently used of `keys` until they fit, but never the last one."""
        if budget_bytes is None:
            return
        first = 0
        while (
            first < len(keys) - 1
            and _bytes_of(self._checkpoints[key] for key in keys[first:]) > budget_bytes
        ):
            del self._checkpoints[keys[first]]
            self._counts["evictions"] += 1
            first += 1


def _same_thread(one: CheckpointKey, other: CheckpointKey) -> bool:
    return (one.tenant, one.thread) == (other.tenant, other.thread)


def _used(checkpoint: Checkpoint) -> list[UsedRows]:
    return [
        UsedRows(str(id(e.payload)), e.payload.rows, e.row, e.row + e.length)
        for e in checkpoint.extents
    ]


def _bytes_of(checkpoints: Iterable[Checkpoint]) -> int:
    payloads, rows = set(), 0
    for checkpoint in checkpoints:
        rows += sum(
            array.nbytes for array in (checkpoint.token_ids, checkpoint.origins, checkpoint.scores)
        )
        payloads |= {extent.payload for extent in checkpoint.extents}
    return rows + sum(payload.nbytes for payload in payloads)
