"""One thread's checkpoints in a store beyond this process's memory.

A store may fail, be slow or hold nothing; a thread never depends on it. What cannot be read is
computed, and what cannot be written is lost with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from dataclasses import replace

from patchkv_agents.checkpoint import Checkpoint, CheckpointKey
from patchkv_agents.checkpoint.stores.base import CheckpointLoad, CheckpointStore

_LOG = logging.getLogger(__name__)


class StoredThread:
    """The part of a checkpoint store that belongs to one thread and namespace.

    Saves happen in the background, in order; a deletion waits for those before it.

    Args:
        store: where checkpoints lie.
        queue: runs one job at a time.
        scope: names the thread; its `version` is not used.
    """

    def __init__(self, store: CheckpointStore, queue: Executor, scope: CheckpointKey) -> None:
        self._store = store
        self._queue = queue
        self._scope = scope

    def save(self, version: str, checkpoint: Future[Checkpoint]) -> None:
        """Save a version once its checkpoint is there."""
        self._queue.submit(self._save, version, checkpoint)

    def newest(self, ancestry: Iterable[str]) -> tuple[str, CheckpointLoad] | None:
        """Open the stored version from which a context is best recovered.

        Args:
            ancestry: ids of the context's version and those it came from, newest first.

        Returns:
            Its id and what is arriving of it: the first of `ancestry` that is stored, else the
            version that was used last. None if there is none.

        Raises:
            CheckpointError: the store or the checkpoint cannot be read.
        """
        stored = [key.version for key in self._keys()]
        if not stored:
            return None
        chosen = next((version for version in ancestry if version in stored), stored[-1])
        load = self._store.open(self._key(chosen))
        return None if load is None else (chosen, load)

    def versions(self) -> list[str]:
        """Ids of the stored versions; waits for saves under way.

        Raises:
            CheckpointError: the store cannot be read.
        """
        return self._queue.submit(lambda: [key.version for key in self._keys()]).result()

    def delete(self, versions: Iterable[str]) -> None:
        """Delete versions, and whatever shares payload with what only they refer to.

        Raises:
            CheckpointError: it cannot be made sure that they are gone.
        """

        def job() -> None:
            for version in versions:
                self._store.delete(self._key(version))

        self._queue.submit(job).result()

    def delete_all(self) -> None:
        """Delete everything of the thread, in all its namespaces.

        Raises:
            CheckpointError: it cannot be made sure that it is gone.
        """
        scope = self._scope
        self._queue.submit(self._store.delete_thread, scope.tenant, scope.thread).result()

    def _save(self, version: str, checkpoint: Future[Checkpoint]) -> None:
        try:
            self._store.save(self._key(version), checkpoint.result())
        except Exception as error:  # in the background there is nobody to raise it to
            _LOG.warning("version %s of thread %s was not saved: %s", version, self._scope, error)

    def _keys(self) -> list[CheckpointKey]:
        scope = self._scope
        return self._store.versions(scope.fingerprint, scope.tenant, scope.thread, scope.namespace)

    def _key(self, version: str) -> CheckpointKey:
        return replace(self._scope, version=version)
