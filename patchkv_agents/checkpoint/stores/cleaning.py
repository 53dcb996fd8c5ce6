"""Eviction and garbage collection in a blob store."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial

from patchkv_agents.checkpoint.key import CheckpointKey
from patchkv_agents.checkpoint.serialization import Arrays, Manifest, checksum, split
from patchkv_agents.checkpoint.stores import names
from patchkv_agents.checkpoint.stores.base import UsedRows, all_of, without_dead_rows
from patchkv_agents.checkpoint.stores.blobs import BlobInfo, BlobStore
from patchkv_agents.errors import CheckpointError


class Cleaner:
    """Deletes versions and garbage. Manifests are deleted first, so that no version is partial.

    Args:
        blobs: the store.
        pool: runs requests side by side.
        budget_bytes, keep_versions, expire_s, grace_s: see `BlobCheckpointStore`.
    """

    def __init__(
        self,
        blobs: BlobStore,
        pool: Executor,
        budget_bytes: int | None,
        keep_versions: int,
        expire_s: float | None,
        grace_s: float,
    ) -> None:
        self._blobs = blobs
        self._pool = pool
        self._budget_bytes = budget_bytes
        self._keep_versions = max(1, keep_versions)
        self._expire_s = expire_s
        self._grace_s = grace_s
        self.evictions = 0
        """Versions removed so far for a limit or their age."""

    def forget(self, key: CheckpointKey) -> None:
        """Delete all data of the thread that no version other than `key` refers to."""
        infos = self._blobs.list_blobs(names.folder_of(key))
        manifests = self._manifests(infos)
        manifests.pop(names.manifest_of(key), None)
        used = {}
        for name, manifest in manifests.items():
            arrays = None if manifest is None else self._arrays(manifest)
            if manifest is not None and arrays is not None:
                used[name] = _used_rows(manifest, arrays)
        staying = {name: manifests[name] for name in without_dead_rows(used)}
        self._remove(infos, staying, [info.name for info in infos])

    def remove_thread(self, tenant: str, thread: str) -> None:
        """Delete everything of a thread."""
        infos = self._blobs.list_blobs(names.folder_of(CheckpointKey("", tenant, thread, "", "")))
        self._remove(infos, {}, [info.name for info in infos])

    def make_room(self, saved: CheckpointKey) -> None:
        """Evict versions beyond the thread's number and beyond the budget of all threads."""
        infos = self._blobs.list_blobs(names.folder_of(saved))
        versions = [info for info in infos if names.is_manifest_in_scope_of(saved, info.name)]
        if len(versions) > self._keep_versions:
            versions.sort(key=lambda info: info.modified_s)
            others = [info.name for info in versions if info.name != names.manifest_of(saved)]
            self._evict(infos, others[: len(versions) - self._keep_versions])
        self._fit_budget(names.manifest_of(saved))

    def sweep(self) -> None:
        """Delete expired versions, garbage, and versions beyond the budget."""
        self._blobs.remove_partial(self._grace_s)
        by_folder: dict[str, list[BlobInfo]] = {}
        for info in self._blobs.list_blobs():
            by_folder.setdefault(names.folder_in(info.name), []).append(info)
        oldest = None if self._expire_s is None else time.time() - self._expire_s
        for infos in by_folder.values():
            expired = [
                info.name
                for info in infos
                if names.is_manifest(info.name) and oldest is not None and info.modified_s <= oldest
            ]
            self._evict(infos, expired)
        self._fit_budget()

    def _fit_budget(self, saved: str | None = None) -> None:
        """Evict least recently used versions, except `saved`, until the budget holds."""
        if self._budget_bytes is None:
            return
        infos = self._blobs.list_blobs()
        excess = sum(info.size for info in infos) - self._budget_bytes
        versions = [i for i in infos if names.is_manifest(i.name) and i.name != saved]
        versions.sort(key=lambda info: info.modified_s)
        for info in versions:
            if excess <= 0:
                return
            folder = names.folder_in(info.name)
            excess -= self._evict(self._blobs.list_blobs(folder), [info.name])

    def _evict(self, infos: Sequence[BlobInfo], evicted: Collection[str]) -> int:
        """Delete versions and old garbage from a folder; returns the bytes that this freed."""
        manifests = self._manifests(infos)
        staying = {name: m for name, m in manifests.items() if name not in evicted}
        leaving = [m for name, m in manifests.items() if name in evicted and m is not None]
        self.evictions += len(manifests) - len(staying)
        unwanted = {*evicted}
        if None not in staying.values():  # else nobody knows what that one refers to
            now = time.time()
            unwanted |= {name for manifest in leaving for name in names.blobs_of(manifest)}
            unwanted |= {info.name for info in infos if now - info.modified_s >= self._grace_s}
        return self._remove(infos, staying, unwanted)

    def _remove(
        self,
        infos: Iterable[BlobInfo],
        staying: Mapping[str, Manifest | None],
        unwanted: Collection[str],
    ) -> int:
        """Delete those of `doomed` to which no staying version refers; gives their bytes."""
        referenced = set(staying)
        for manifest in staying.values():
            if manifest is not None:
                referenced |= set(names.blobs_of(manifest))
        deleted = [info for info in infos if info.name in unwanted and info.name not in referenced]
        for manifests in (True, False):
            batch = [info.name for info in deleted if names.is_manifest(info.name) is manifests]
            if batch:
                self._blobs.delete(batch)
        return sum(info.size for info in deleted)

    def _manifests(self, infos: Iterable[BlobInfo]) -> dict[str, Manifest | None]:
        wanted = [info.name for info in infos if names.is_manifest(info.name)]
        return read_manifests(self._blobs, self._pool, wanted)

    def _arrays(self, manifest: Manifest) -> Arrays | None:
        data = self._blobs.get(manifest.arrays)
        if data is None or checksum(data) != manifest.arrays_checksum:
            return None
        return split(data, manifest.shapes)


def read_manifests(
    blobs: BlobStore, pool: Executor, wanted: Sequence[str]
) -> dict[str, Manifest | None]:
    """Manifests by name, without missing ones; None where one is damaged or of another schema."""
    manifests: dict[str, Manifest | None] = {}
    contents = all_of(pool, [partial(blobs.get, name) for name in wanted])
    for name, data in zip(wanted, contents, strict=True):
        if data is None:
            continue
        try:
            manifests[name] = Manifest.decode(bytes(data))
        except CheckpointError:
            manifests[name] = None
    return manifests


def _used_rows(manifest: Manifest, arrays: Arrays) -> list[UsedRows]:
    return [
        UsedRows(
            manifest.payloads[number].id,
            int(arrays[f"block_rows.{number}"][-1]),
            row,
            row + length,
        )
        for number, row, length, _ in arrays["extents"].tolist()
    ]
