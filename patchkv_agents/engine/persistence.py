"""Threads in stores beyond this process's memory.

A store may fail, be slow or hold nothing; a thread never depends on it. What cannot be read is
computed, and what cannot be written is lost with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from patchkv_agents.checkpoint import Checkpoint, CheckpointKey
from patchkv_agents.checkpoint.stores.base import CheckpointLoad, CheckpointStore
from patchkv_agents.context import ContextHistory, ThreadKey
from patchkv_agents.jobs import submitted

if TYPE_CHECKING:
    from patchkv_agents.context import HistoryStore

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


class ThreadStores:
    """Where threads are kept beyond this process: histories and checkpoints.

    Args:
        fingerprint: names the model; called when it is needed first, since it takes time.
        tenant: whose threads these are.
        checkpoints: keeps suspended versions, if given.
        histories: keeps histories, if given; else they are in memory.
    """

    def __init__(
        self,
        fingerprint: Callable[[], str],
        tenant: str,
        checkpoints: CheckpointStore | None,
        histories: HistoryStore | None,
    ) -> None:
        self._fingerprint = fingerprint
        self._tenant = tenant
        self._checkpoints = checkpoints
        self._histories = histories
        self._queue = ThreadPoolExecutor(1, thread_name_prefix="patchkv-store")

    @property
    def keeps_histories(self) -> bool:
        """Whether histories lie in a store that goes on after the threads."""
        return self._histories is not None

    def history(self, key: ThreadKey) -> ContextHistory:
        """A thread's history: in the history store, or in memory of its own.

        Raises:
            HistoryStoreError: the store cannot be read.
        """
        return ContextHistory(self._histories, thread=key.thread, namespace=key.namespace)

    def checkpoints(self, key: ThreadKey) -> StoredThread | None:
        """A thread's checkpoints; None without a store."""
        if self._checkpoints is None:
            return None
        scope = CheckpointKey(
            self._fingerprint(), self._tenant, key.thread, key.namespace, version=""
        )
        return StoredThread(self._checkpoints, self._queue, scope)

    def threads(self) -> tuple[ThreadKey, ...]:
        """The threads whose histories are in the history store, last changed first.

        Raises:
            HistoryStoreError: the store cannot be read.
        """
        if self._histories is None:
            return ()
        newest = {
            key: max(self._histories.branches(key).values(), default="")
            for key in self._histories.threads()
        }
        return tuple(sorted(newest, key=newest.__getitem__, reverse=True))

    def delete(self, key: ThreadKey, *, erase: bool) -> None:
        """Delete what the stores hold of a thread, the checkpoints of all its namespaces included.

        Args:
            key: the thread.
            erase: clean the history store's files at once, which may rebuild them.

        Raises:
            CheckpointError, HistoryStoreError: a store cannot delete it.
        """
        stored = self.checkpoints(key)
        if stored is not None:
            stored.delete_all()
        if self._histories is not None:
            with self._histories.writing(key):
                self._histories.delete(key)
            if erase:
                self._histories.erase()

    def wait_until_saved(self) -> None:
        """Wait until what is on its way to the checkpoint store is there."""
        submitted(lambda: None, self._queue).result()
