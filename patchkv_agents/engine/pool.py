"""The threads of an engine: one registry, one memory budget, one order of use."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from patchkv_agents.checkpoint import CheckpointVersions, MemoryBudget
from patchkv_agents.checkpoint.budget import default_budget_bytes
from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.context import ThreadKey
from patchkv_agents.engine.observers import CallObservers
from patchkv_agents.engine.persistence import ThreadStores
from patchkv_agents.engine.runtime import ModelRuntime
from patchkv_agents.engine.sequence import KVSequence, Packing
from patchkv_agents.engine.thread import Thread
from patchkv_agents.engine.thread_state import ThreadState
from patchkv_agents.errors import CheckpointError, InputError, PatchKVError
from patchkv_agents.recovery.policy import RecoveryPolicy

MAX_THREADS = 512
"""Threads that a pool keeps by default."""

_LOG = logging.getLogger(__name__)


class ThreadPool:
    """All threads over one model. Safe for several Python threads.

    A pool keeps the threads that were used last, at most `max_threads`; the others are suspended,
    and given up unless somebody still refers to them. What is saved in a store comes back from
    there under the same id.

    The state of all threads together, live and stored, is kept within the memory budget. Where it
    is exceeded, threads that were used longest ago are suspended, then packed with loss, then
    evicted; those that were used only once go before all others. A thread that is answering keeps
    its state.

    Args:
        runtime: the model.
        stores: where threads are kept beyond this process.
        observers: notified of each call.
        policy: how contexts are recovered unless a call says otherwise.
        storage: the formats in which rows are packed.
        packing: how threads are suspended unless `Thread.suspend` is told.
        memory_budget_bytes: of all KV state; a quarter of the machine's memory if left out.
        max_threads: threads that are kept.

    Attributes:
        lock: held while threads are added and dropped.
        policy, storage, memory_budget_bytes, max_threads: as given; may be changed.
    """

    def __init__(
        self,
        runtime: ModelRuntime,
        stores: ThreadStores,
        observers: CallObservers,
        *,
        policy: RecoveryPolicy,
        storage: PrecisionPolicy,
        packing: Packing = "under_pressure",
        memory_budget_bytes: int | None = None,
        max_threads: int = MAX_THREADS,
    ) -> None:
        self.lock = threading.RLock()
        self.memory_budget_bytes = (
            default_budget_bytes() if memory_budget_bytes is None else memory_budget_bytes
        )
        self.max_threads = max_threads
        self.policy = policy
        self.storage = storage
        self._runtime = runtime
        self._stores = stores
        self._observers = observers
        self._packing = packing
        self._budget = MemoryBudget(self.memory_budget_bytes)
        self._kept: OrderedDict[ThreadKey, Thread] = OrderedDict()  # least recently used first
        self._alive: WeakValueDictionary[ThreadKey, Thread] = WeakValueDictionary()
        self._fitting = threading.Lock()

    def __len__(self) -> int:
        """Threads that are kept."""
        return len(self._kept)

    def thread(
        self, key: ThreadKey, *, new: bool = False, storage: PrecisionPolicy | None = None
    ) -> Thread:
        """The thread of this name, made at its first use.

        Args:
            key: names it.
            new: refuse a thread that exists.
            storage: the formats in which the rows of a new thread are packed; the pool's if left
                out.

        Raises:
            InputError: `new` is set and the thread exists.
        """
        with self.lock:
            thread = self._alive.get(key)
            if new and thread is not None:
                raise InputError(f"thread '{key.thread}' exists: choose another id or drop it")
            if thread is None:
                thread = self._alive[key] = self._made(key, storage or self.storage)
            self._kept[key] = thread
            self._kept.move_to_end(key)
            surplus = max(0, len(self._kept) - self.max_threads)
            oldest = [each for each in self._kept.values() if not each.is_busy][:surplus]
        for each in oldest:
            if each is not thread:
                self._retire(each)
        return thread

    def threads(self) -> list[Thread]:
        """All threads that are kept here, or that somebody refers to."""
        with self.lock:
            return list(self._alive.values())

    def drop(self, key: ThreadKey) -> None:
        """Forget a thread and its state in memory. An unknown name is ignored."""
        with self.lock:
            self._kept.pop(key, None)
            self._alive.pop(key, None)

    def fork(
        self, thread: Thread, thread_id: str, storage: PrecisionPolicy | None = None
    ) -> Thread:
        """A new thread at the version of `thread`, which is locked, that shares its stored state.

        Raises:
            InputError: the thread exists.
            HistoryStoreError: the history store has one of this name.
        """
        sequence = thread.sequence.fork(
            storage=storage
        )  # may fail; the new thread is registered after it
        with self.lock:  # nobody gets hold of it half made
            key = ThreadKey(thread_id, thread.namespace)
            copy = self.thread(key, new=True)
            try:
                name = thread_id if self._stores.keeps_histories else None
                history = thread.history.fork(name, namespace=thread.namespace)
            except PatchKVError:  # the history store has such a thread from an earlier time
                self.drop(key)
                raise
            copy.become_fork(thread, history, sequence)
        return copy

    def clear_forks(
        self, thread: Thread, histories: Collection[ThreadKey], forgetting: str
    ) -> None:
        """Delete the KV state of the threads of these histories, `thread` itself left out.

        Of threads that are not open here, what is stored of versions before `forgetting` goes.

        Args:
            thread: was told to forget.
            histories: that saw the same.
            forgetting: id of the version that says so.

        Raises:
            CheckpointError: the store cannot delete it. Memory is cleared all the same.
        """
        store = thread.history.store
        with self.lock:
            related = [
                each
                for each in self._alive.values()
                if each.history.key in histories and each.history.store is store
            ]
        failures = []
        for each in related:
            if each is not thread:
                try:
                    each.clear_for(forgetting)
                except CheckpointError as error:  # memory of all the others is cleared first
                    failures.append(error)
        if failures:
            raise failures[0]
        if self._stores.keeps_histories:  # else the names of histories are not those of threads
            for key in {*histories} - {each.history.key for each in related}:
                stored = self._stores.checkpoints(key)
                if stored is not None:
                    stored.forget(lambda version: version < forgetting, sweep=False)

    # Memory

    def memory(self) -> tuple[int, int]:
        """Bytes of live caches, and of stored rows, where shared payload counts once."""
        return sum(each.sequence.live_bytes for each in self.threads()), self._budget.used_bytes

    def suspend_idle(self, idle_s: float = 0.0) -> int:
        """Suspend the threads that were not used for so long; returns how many."""
        before = time.monotonic() - idle_s
        idle = [each for each in self.threads() if each.sequence.is_live and each.used_s <= before]
        return sum(self._suspend(each, None) for each in idle)

    def fit(self) -> int:
        """Bring the state of all threads into the memory budget; returns how many lost state.

        Takes no time where there is room.
        """
        live_bytes, stored_bytes = self.memory()
        # Rows on their way into storage count nowhere for a moment: the budget fits them itself.
        self._budget.limit_bytes = max(0, self.memory_budget_bytes - live_bytes)
        if live_bytes + stored_bytes <= self.memory_budget_bytes:
            return 0
        if not self._fitting.acquire(blocking=False):  # somebody else is at it
            return 0
        try:
            return self._make_room()
        finally:
            self._fitting.release()

    @contextmanager
    def keeping_within_memory(self) -> Iterator[None]:
        """Brings the state of all threads into the memory budget when it is left."""
        try:
            yield
        finally:
            self.fit()

    def _make_room(self) -> int:
        before = {each: len(each.sequence.token_ids) for each in self.threads()}
        for each in sorted(before, key=lambda each: (each.sequence.is_reused, each.used_s)):
            if sum(self.memory()) <= self.memory_budget_bytes:
                break
            if each.sequence.is_live:
                self._suspend(each, "now")
                self._runtime.wait_until_stored()
            else:
                each.sequence.pack()
        live_bytes, _ = self.memory()
        self._budget.limit_bytes = max(0, self.memory_budget_bytes - live_bytes)
        self._budget.fit()
        return sum(before[each] > 0 == len(each.sequence.token_ids) for each in before)

    def _suspend(self, thread: Thread, packing: Packing | None) -> bool:
        """Suspend a thread unless it is answering; returns whether it is suspended now."""
        try:
            return thread.suspend_if_idle(packing)
        except Exception:
            _LOG.exception("a thread could not be suspended")
            return False

    def _retire(self, thread: Thread) -> None:
        """Suspend a thread, and no longer keep it."""
        if self._suspend(thread, None):
            with self.lock:
                self._kept.pop(thread.key, None)

    def _made(self, key: ThreadKey, storage: PrecisionPolicy) -> Thread:
        runtime = self._runtime
        sequence = KVSequence(
            runtime.adapter,
            runtime.rope,
            versions=CheckpointVersions(self._budget),
            worker=runtime.offload_worker,
            storage=storage,
        )
        state = ThreadState(self._stores.history(key), sequence, self._stores.checkpoints(key))
        return Thread(
            key,
            runtime,
            state,
            host=self,
            observers=self._observers,
            packing=self._packing,
        )
