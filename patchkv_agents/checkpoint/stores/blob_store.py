"""Checkpoints in a blob store: a local folder, an object store, Redis."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from weakref import WeakKeyDictionary, WeakValueDictionary

from patchkv_agents.checkpoint.checkpoint import Checkpoint
from patchkv_agents.checkpoint.key import CheckpointKey
from patchkv_agents.checkpoint.serialization import (
    Arrays,
    Manifest,
    PayloadBytes,
    PayloadRecord,
    arrays_of,
    checkpoint_of,
    checksum,
    empty_payload,
    joined,
    split,
    tensor_records,
)
from patchkv_agents.checkpoint.stores import names
from patchkv_agents.checkpoint.stores.base import (
    CheckpointLoad,
    StoreStats,
    all_of,
    result_by,
)
from patchkv_agents.checkpoint.stores.blobs import MAX_PART_BYTES, BlobStore
from patchkv_agents.checkpoint.stores.cleaning import Cleaner, read_manifests
from patchkv_agents.errors import CheckpointError
from patchkv_agents.jobs import submitted
from patchkv_kernels.payload import Payload


class BlobCheckpointStore:
    """A `CheckpointStore` on a `BlobStore` that processes and machines may share.

    A version exists once its manifest exists, which is written last. Readers verify every byte.
    Each payload is written once per thread; versions that share it name the same parts. There are
    no locks between processes: where one deletes a part that another is about to refer to, the
    other version is incomplete, and its load raises an error.

    Args:
        budget_bytes: of all blobs; the least recently used versions are evicted. Each save lists
            the whole store, so use it for local folders.
        keep_versions: of each thread, model and namespace.
        expire_s: `sweep` removes versions not used for this long; for stores without expiry.
        grace_s: age from which an unreferenced blob counts as garbage of a writer that died,
            not as the work of a writer that is still busy.
        load_timeout_s: limit for a whole load.
        workers: parts that are read or written at once.
        part_bytes: size of a part, at most 64 MiB; None for what suits `blobs`.
    """

    def __init__(
        self,
        blobs: BlobStore,
        *,
        budget_bytes: int | None = None,
        keep_versions: int = 20,
        expire_s: float | None = None,
        grace_s: float = 3600.0,
        load_timeout_s: float = 30.0,
        workers: int = 4,
        part_bytes: int | None = None,
    ) -> None:
        self._blobs = blobs
        self._part_bytes = min(part_bytes or blobs.part_bytes, MAX_PART_BYTES)
        self._load_timeout_s = load_timeout_s
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="patchkv-blobs")
        self._cleaner = Cleaner(blobs, self._pool, budget_bytes, keep_versions, expire_s, grace_s)
        self._lock = threading.RLock()  # one save or deletion at a time in this process
        self._counts: Counter[str] = Counter()
        # Payloads that are in this process and in the store.
        self._records: WeakKeyDictionary[Payload, PayloadRecord] = WeakKeyDictionary()
        self._payloads: WeakValueDictionary[str, Payload] = WeakValueDictionary()

    def save(self, key: CheckpointKey, checkpoint: Checkpoint) -> None:
        """Write missing parts, then the manifest; then evict."""
        payloads = list(dict.fromkeys(extent.payload for extent in checkpoint.extents))
        folder, manifest = names.folder_of(key), names.manifest_of(key)
        written: list[str] = []
        with self._lock:
            sizes = {info.name: info.size for info in self._blobs.list_blobs(folder)}
            # Other processes may be saving this version too. Only arrays to which a manifest has
            # referred, and which the new one replaces, can be deleted: others may be about to be
            # referred to.
            replaced = self._arrays_in(manifest) if manifest in sizes else []
            try:
                records = tuple(self._put(folder, p, sizes, written) for p in payloads)
                arrays, shapes = joined(arrays_of(checkpoint, payloads))
                arrays_name = names.new_arrays_of(key)
                self._blobs.put(arrays_name, arrays)
                written.append(arrays_name)
                document = Manifest(key, arrays_name, checksum(arrays), shapes, records)
                self._blobs.put(manifest, document.encode())
            except BaseException:
                # Where space ran out, what was written must not keep it.
                with contextlib.suppress(CheckpointError):
                    self._blobs.delete(written)
                raise
            for payload, record in zip(payloads, records, strict=True):
                self._remember(payload, record)
            if replaced:
                self._blobs.delete(replaced)
            self._cleaner.make_room(key)

    def load(self, key: CheckpointKey) -> Checkpoint | None:
        """The checkpoint of exactly this key, or None if there is none."""
        loading = self.open(key)
        if loading is None:
            return None
        loading.wait()
        return loading.checkpoint

    def open(self, key: CheckpointKey) -> CheckpointLoad | None:
        """As `load`, but returns while payload parts are on their way, first layers first."""
        deadline = time.monotonic() + self._load_timeout_s
        try:
            entry = self._find(key, deadline)
        except CheckpointError:
            self._counts["misses"] += 1
            raise
        if entry is None:
            self._counts["misses"] += 1
            return None
        manifest, arrays = entry
        folder = names.folder_of(key)
        payloads: list[Payload] = []
        jobs: list[tuple[int, Callable[[], None]]] = []
        for number, record in enumerate(manifest.payloads):
            payload = self._payloads.get(record.id)
            if payload is None:
                payload = empty_payload(
                    record, arrays[f"block_rows.{number}"], arrays[f"positions.{number}"]
                )
                stream = PayloadBytes(payload, record.part_bytes)
                jobs += [
                    (record.first_layer(part), partial(self._fetch, folder, record, stream, part))
                    for part in range(stream.parts)
                ]
            payloads.append(payload)
        jobs.sort(key=lambda job: job[0])
        arrivals = [(first_layer, submitted(fetch, self._pool)) for first_layer, fetch in jobs]

        def on_end(complete: bool) -> None:
            self._counts["hits" if complete else "misses"] += 1
            if complete:
                for payload, record in zip(payloads, manifest.payloads, strict=True):
                    self._remember(payload, record)
                with contextlib.suppress(CheckpointError):
                    self._blobs.touch(names.blobs_of(manifest))

        return CheckpointLoad(checkpoint_of(arrays, payloads), arrivals, deadline, on_end)

    def versions(
        self, fingerprint: str | None, tenant: str, thread: str, namespace: str
    ) -> list[CheckpointKey]:
        """The stored versions of a thread whose manifests can be read, longest unused first."""
        scope = CheckpointKey(fingerprint or "", tenant, thread, namespace, "")
        infos = self._blobs.list_blobs(names.folder_of(scope))
        in_scope = [
            info
            for info in infos
            if names.is_manifest_in_scope_of(scope, info.name)
            or (fingerprint is None and names.is_manifest(info.name))
        ]
        in_scope.sort(key=lambda info: info.modified_s)
        manifests = read_manifests(self._blobs, self._pool, [info.name for info in in_scope])
        keys = [manifest.key for manifest in manifests.values() if manifest is not None]
        return [key for key in keys if key.namespace == namespace]

    def delete(self, key: CheckpointKey) -> None:
        """Delete a version (see `CheckpointStore.delete`)."""
        with self._lock:
            self._cleaner.forget(key)

    def delete_thread(self, tenant: str, thread: str) -> None:
        """Delete everything of a thread, for all models and namespaces."""
        with self._lock:
            self._cleaner.remove_thread(tenant, thread)

    def sweep(self) -> None:
        """Remove expired versions, versions beyond the budget, and garbage of writers that died.

        It reads every manifest: call it from time to time, from one process.
        """
        with self._lock:
            self._cleaner.sweep()

    def stats(self) -> StoreStats:
        """Counts and sizes; lists the whole store."""
        infos = self._blobs.list_blobs()
        return StoreStats(
            checkpoints=sum(names.is_manifest(info.name) for info in infos),
            stored_bytes=sum(info.size for info in infos),
            hits=self._counts["hits"],
            misses=self._counts["misses"],
            evictions=self._cleaner.evictions,
        )

    def close(self) -> None:
        """Release connections and threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._blobs.close()

    # Writing

    def _put(
        self, folder: str, payload: Payload, sizes: Mapping[str, int], written: list[str]
    ) -> PayloadRecord:
        """Write the parts of a payload that are not there in full, and add them to `written`."""
        known = self._records.get(payload)
        if known is not None:
            part_names = names.parts_of(folder, known)
            missing = [
                part
                for part, name in enumerate(part_names)
                if sizes.get(name) != known.part_size(part)
            ]
            if missing:
                self._put_parts(
                    PayloadBytes(payload, known.part_bytes), part_names, missing, written
                )
            self._blobs.touch([n for part, n in enumerate(part_names) if part not in missing])
            return known
        stream = PayloadBytes(payload, self._part_bytes)
        identity = uuid.uuid4().hex
        part_names = [names.part_of(folder, identity, part) for part in range(stream.parts)]
        checksums = self._put_parts(stream, part_names, range(stream.parts), written)
        return PayloadRecord(
            id=identity,
            format=payload.format,
            tensors=tensor_records(payload),
            part_bytes=self._part_bytes,
            checksums=tuple(checksums),
        )

    def _arrays_in(self, manifest: str) -> list[str]:
        """The arrays to which a manifest refers; none if it is gone or damaged."""
        data = self._blobs.get(manifest)
        with contextlib.suppress(CheckpointError):
            return [Manifest.decode(bytes(data)).arrays] if data is not None else []
        return []

    def _put_parts(
        self,
        stream: PayloadBytes,
        part_names: Sequence[str],
        parts: Sequence[int],
        written: list[str],
    ) -> list[str]:
        """Write some parts of a payload; gives their checksums."""
        written += [part_names[part] for part in parts]

        def put(part: int) -> str:
            data = stream.read(part)
            self._blobs.put(part_names[part], data)
            return checksum(data)

        return all_of(self._pool, [partial(put, part) for part in parts])

    def _remember(self, payload: Payload, record: PayloadRecord) -> None:
        self._records[payload] = record
        self._payloads[record.id] = payload

    # Reading

    def _find(self, key: CheckpointKey, deadline: float) -> tuple[Manifest, Arrays] | None:
        """The manifest and arrays of `key`, or None if there is no manifest."""
        for _ in range(2):  # a save in between replaces both
            data = self._get(names.manifest_of(key), deadline)
            if data is None:
                return None
            manifest = Manifest.decode(bytes(data))
            if manifest.key != key:
                raise CheckpointError("a stored checkpoint is not the one that its name says")
            arrays = self._get(manifest.arrays, deadline)
            if arrays is not None:
                if checksum(arrays) != manifest.arrays_checksum:
                    raise CheckpointError("the arrays of a stored checkpoint are damaged")
                return manifest, split(arrays, manifest.shapes)
        raise CheckpointError("a stored checkpoint is incomplete: its arrays are missing")

    def _get(self, name: str, deadline: float) -> memoryview | None:
        return result_by(submitted(partial(self._blobs.get, name), self._pool), deadline)

    def _fetch(self, folder: str, record: PayloadRecord, stream: PayloadBytes, part: int) -> None:
        name = names.part_of(folder, record.id, part)
        data = self._blobs.get(name)
        if data is None:
            raise CheckpointError("a stored checkpoint is incomplete: a payload part is missing")
        if len(data) != record.part_size(part) or checksum(data) != record.checksums[part]:
            with contextlib.suppress(CheckpointError):
                self._blobs.delete([name])  # saves would take it for stored
            raise CheckpointError("a payload part of a stored checkpoint is damaged")
        stream.fill(part, data)
