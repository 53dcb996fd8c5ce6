"""One thread's checkpoints in a store beyond this process's memory.

A store may fail, be slow or hold nothing; a thread never depends on it. What cannot be read is
computed, and what cannot be written is lost with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from itertools import islice

from patchkv_agents.checkpoint import Checkpoint, CheckpointKey
from patchkv_agents.checkpoint.stores.base import CheckpointLoad, CheckpointStore
from patchkv_agents.jobs import submitted

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
        submitted(partial(self._save, version, checkpoint), self._queue)

    def newest(
        self, ancestry: Iterable[str], usable: Callable[[str], bool]
    ) -> tuple[str, CheckpointLoad] | None:
        """Open the stored version from which a context is best recovered.

        Args:
            ancestry: ids of the context's version and those it came from, newest first.
            usable: whether a version's state may be used. No other is opened.

        Returns:
            Its id and what is arriving of it: the first of `ancestry` that is stored, else the
            version that was used last. None if there is none.

        Raises:
            CheckpointError: the store or the checkpoint cannot be read.
        """
        branch = iter(ancestry)
        # By name, the likely ones cost no listing, and one that is damaged is an error.
        for version in islice(branch, 2):
            load = self._store.open(self._key(version)) if usable(version) else None
            if load is not None:
                return version, load
        keys = self._keys(self._scope.fingerprint)
        stored = [key.version for key in keys if usable(key.version)]
        if not stored:
            return None
        chosen = next((version for version in branch if version in stored), stored[-1])
        load = self._store.open(self._key(chosen))
        return None if load is None else (chosen, load)

    def versions(self) -> list[str]:
        """Ids of the stored versions; waits for saves under way.

        Raises:
            CheckpointError: the store cannot be read.
        """
        fingerprint = self._scope.fingerprint
        keys = submitted(partial(self._keys, fingerprint), self._queue).result()
        return [key.version for key in keys]

    def forget(self, saw: Callable[[str], bool], *, sweep: bool) -> None:
        """Delete the versions of which `saw` is true, whichever model computed them.

        Whatever shares payload with what only they refer to goes too.

        Args:
            saw: whether the state of a version, by its id, must go.
            sweep: even without such a version, leave nothing to which no version refers, such as
                what a writer that died had written.

        Raises:
            CheckpointError: it cannot be made sure that they are gone.
        """
        gone = [key for key in submitted(self._keys, self._queue).result() if saw(key.version)]
        if sweep and not gone:
            gone = [self._key("")]

        def job() -> None:
            for key in gone:
                self._store.delete(key)

        submitted(job, self._queue).result()

    def delete_all(self) -> None:
        """Delete everything of the thread, in all its namespaces.

        Raises:
            CheckpointError: it cannot be made sure that it is gone.
        """
        scope = self._scope
        job = partial(self._store.delete_thread, scope.tenant, scope.thread)
        submitted(job, self._queue).result()

    def _save(self, version: str, checkpoint: Future[Checkpoint]) -> None:
        try:
            self._store.save(self._key(version), checkpoint.result())
        except Exception as error:  # in the background there is nobody to raise it to
            _LOG.warning("version %s of thread %s was not saved: %s", version, self._scope, error)

    def _keys(self, fingerprint: str | None = None) -> list[CheckpointKey]:
        scope = self._scope
        return self._store.versions(fingerprint, scope.tenant, scope.thread, scope.namespace)

    def _key(self, version: str) -> CheckpointKey:
        return replace(self._scope, version=version)
