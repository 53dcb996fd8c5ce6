"""The conversations of all tenants: which one a request belongs to, and what is kept of each."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from patchkv_agents.context import ThreadKey
from patchkv_server.gauges import Place
from patchkv_server.shapes import Shape

if TYPE_CHECKING:
    from patchkv_agents.engine import Engine, Thread
    from patchkv_server.requests import ChatRequest

WORTH_SHARING = 200
"""Characters of a common beginning from which on its rows are copied to a new thread."""
WORTH_WAITING = 2000
"""Characters that need not be computed, for which a request waits until its thread is free."""

_OURS = "serve/"
"""Begins the ids of the server's threads: what else a history file holds is left alone."""


@dataclass(slots=True, eq=False)
class Entry:
    """What the table knows of a thread. Guarded by the table's lock.

    Attributes:
        key: of the engine's thread.
        tenant, name: whose it is, and what the client calls it.
        shapes: of its newest context, and of the one before, which counts if that fails.
        turns: contexts that were answered, also by earlier processes.
        used: time of the last use, of `time.monotonic`.
        is_busy: answering, or being suspended or given up.
        place: where its state is.
        live_bytes, suspended_bytes: of its state in memory.
    """

    key: ThreadKey
    tenant: str
    name: str
    shapes: deque[Shape] = field(default_factory=lambda: deque(maxlen=2))
    turns: int = 0
    used: float = 0.0
    is_busy: bool = False
    place: Place = "stored"
    live_bytes: int = 0
    suspended_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A thread that is taken for one request.

    Attributes:
        entry: the thread.
        source: another thread, which begins alike and is taken until that was copied.
    """

    entry: Entry
    source: Entry | None = None


class ThreadTable:
    """All threads of a server. Its methods may be called from any thread, and do not wait.

    What a tenant's request meets are this tenant's threads alone.

    Args:
        engine: that runs them.
        most: threads to remember.
        has_store: whether state that is not in memory may be in the engine's store.
        on_failure: is told what went wrong with one thread; the others go on.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        most: int,
        has_store: bool,
        on_failure: Callable[[str, Exception], None],
    ) -> None:
        self._engine = engine
        self._on_failure = on_failure
        self._most = most
        self._has_store = has_store
        self._lock = threading.Lock()
        self._entries: dict[ThreadKey, Entry] = {}

    def rediscover(self) -> None:
        """Take up the newest threads that the engine's history store has, and delete the others.

        Reads the store, which takes time. A thread that cannot be read stays there as it is, and
        is not taken up.
        """
        known = [key for key in self._engine.stores.threads() if key.thread.startswith(_OURS)]
        now = time.monotonic()
        for age, key in enumerate(known[: self._most]):
            try:
                history = self._engine.stores.history(key)
                turns, head = len(history), history.head
            except Exception as error:
                self._on_failure("a stored history cannot be read and is left out", error)
                continue
            if head is not None:
                entry = Entry(key, *self.owner_of(key), turns=turns, used=now - age)
                entry.shapes.append(Shape.of_version(head))
                with self._lock:
                    self._entries.setdefault(key, entry)
        for key in known[self._most :]:
            self._delete(key)

    def owner_of(self, key: ThreadKey) -> tuple[str, str]:
        """The tenant of a thread of the engine, and the name by which it knows the thread."""
        tenant, _, name = key.thread.removeprefix(_OURS).partition("/")
        return unquote(tenant), name

    # Requests

    def claim(self, request: ChatRequest) -> Claim | None:
        """The thread for a request, taken for it; None if it is worth waiting for one."""
        with self._lock:
            if request.thread is not None:
                key = _key(request.tenant, request.thread)
                entry = self._entries.get(key)
                if entry is None:
                    return self._new(request, key)
            else:
                entry = self._best(request)
                if entry is None:
                    return self._new(request, _key(request.tenant, f"t-{secrets.token_hex(6)}"))
            if entry.is_busy:
                return None
            self._begin(entry, request)
            return Claim(entry)

    def free(self, entry: Entry) -> None:
        """Give a thread back as it is, such as one that was copied from."""
        with self._lock:
            entry.is_busy = False

    def release(self, claim: Claim, thread: Thread | None, *, answered: bool) -> None:
        """Give the threads of a request back.

        Args:
            claim: what was taken.
            thread: the engine's, as far as the request got.
            answered: whether the context was taken up.
        """
        entry = claim.entry
        if thread is not None:
            try:
                self._measure(entry, thread)
            except Exception as error:
                self._on_failure("the state of a thread could not be measured", error)
        with self._lock:
            entry.used = time.monotonic()
            if answered:
                entry.turns += 1
            elif entry.shapes:
                entry.shapes.pop()
            is_empty = not entry.turns and not entry.shapes
            entry.is_busy = is_empty
        if is_empty:
            self._give_up(entry, keep=False)

    def _best(self, request: ChatRequest) -> Entry | None:
        """The conversation that the request continues; None if it begins one."""
        shape, exact = request.shape, self._engine.policy.is_exact
        candidates = []
        for entry in self._entries.values():
            if entry.tenant != request.tenant:
                continue
            if entry.shapes and shape.continues(entry.shapes[-1]):
                # What is being answered has state, or soon will.
                has_state = entry.is_busy or entry.place != "stored" or self._has_store
                left = shape.left_after(entry.shapes[-1], exact=exact) if has_state else shape.size
                # What only goes on stays exact, though another one would leave less to compute.
                is_next = has_state and shape.is_next_turn(entry.shapes[-1])
                candidates.append((not is_next, left, -entry.used, entry))
        candidates.sort(key=lambda candidate: candidate[:3])
        for _, left, _, entry in candidates:
            if not entry.is_busy or shape.size - left >= WORTH_WAITING:
                return entry
        return None

    def _new(self, request: ChatRequest, key: ThreadKey) -> Claim:
        tenant, name = request.tenant, self.owner_of(key)[1]
        source = self._source(request)
        if source is not None:
            source.is_busy = True
        entry = self._entries[key] = Entry(key, tenant, name)
        self._begin(entry, request)
        return Claim(entry, source)

    def _source(self, request: ChatRequest) -> Entry | None:
        """The thread in memory that has most of the request's beginning."""
        best, most = None, WORTH_SHARING
        for entry in self._entries.values():
            if entry.tenant != request.tenant or entry.is_busy or not entry.shapes:
                continue
            # Only of its newest context: that is what is live.
            common = request.shape.common_beginning(entry.shapes[-1])
            if common >= most and entry.place in ("live", "suspended"):
                best, most = entry, common
        return best

    def _begin(self, entry: Entry, request: ChatRequest) -> None:
        entry.is_busy = True
        entry.shapes.append(request.shape)

    # Housekeeping

    def suspend_idle(self, idle_s: float) -> int:
        """Suspend the threads that were not used for so long; returns how many. Takes time."""
        before = time.monotonic() - idle_s
        count = 0
        tried: set[Entry] = set()
        while (entry := self._take("live", tried, before)) is not None:
            count += self._suspend(entry)
        return count

    def fit(self, budget_bytes: int) -> list[str]:
        """Bring state in memory below the budget, and the table to its size. Takes time.

        Threads are suspended, then given up: those that were answered only once go first, then
        those used longest ago. With a store, they come back from there. Those that are too many
        for the table are deleted, from the engine's stores too.

        Returns:
            The tenants whose threads were given up, one for each.
        """
        given_up = self._note_evicted()
        tried: set[Entry] = set()
        while self._bytes() > budget_bytes and (entry := self._take("live", tried)) is not None:
            self._suspend(entry)
        tried = set()
        while (
            self._bytes() > budget_bytes and (entry := self._take("suspended", tried)) is not None
        ):
            if self._give_up(entry):
                given_up.append(entry.tenant)
        tried = set()
        while len(self._entries) > self._most and (entry := self._take(None, tried)) is not None:
            self._delete(entry.key)
            given_up.append(entry.tenant)
        return given_up

    def _note_evicted(self) -> list[str]:
        """Take note of threads whose state the engine has evicted; returns their tenants."""
        holding = {
            thread.key
            for thread in self._engine.pool.threads()
            if thread.sequence.live_bytes or thread.sequence.stored_bytes
        }
        evicted = []
        with self._lock:
            for entry in self._entries.values():
                if not entry.is_busy and entry.place != "stored" and entry.key not in holding:
                    self._note(entry, (0, 0))
                    evicted.append(entry.tenant)
        return evicted

    def suspend_all(self) -> None:
        """Suspend all threads, so that the engine's store gets them."""
        self.suspend_idle(-1.0)

    def _take(
        self, place: Place | None, tried: set[Entry], before: float = float("inf")
    ) -> Entry | None:
        """The thread in this place that can be missed most easily, made busy.

        It is added to those tried already: a pass takes each at most once, whatever comes of it.
        """
        with self._lock:
            idle = [
                entry
                for entry in self._entries.values()
                if not entry.is_busy
                and entry not in tried
                and place in (None, entry.place)
                and entry.used <= before
            ]
            if not idle:
                return None
            entry = min(idle, key=lambda entry: (entry.turns > 1, entry.used))
            entry.is_busy = True
            tried.add(entry)
            return entry

    def _suspend(self, entry: Entry) -> bool:
        """Suspend a busy thread, which is free then; returns whether it went."""
        try:
            thread = self._thread(entry)
            try:
                thread.suspend()
            finally:
                self._measure(entry, thread)
        except Exception as error:
            self._on_failure("a thread could not be suspended", error)
            return False
        finally:
            self.free(entry)
        return True

    def _give_up(self, entry: Entry, *, keep: bool = True) -> bool:
        """Give up a busy thread's state, and without `keep` the thread; returns whether it went."""
        try:
            self._engine.drop(entry.key.thread, namespace=entry.key.namespace)
        except Exception as error:
            self._on_failure("a thread could not be given up", error)
            self.free(entry)
            return False
        with self._lock:
            self._note(entry, (0, 0))
            entry.is_busy = False
            # Without history nothing of it is left that could be gone on with.
            if not keep or not (self._engine.stores.keeps_histories or self._has_store):
                self._entries.pop(entry.key, None)
        return True

    def _delete(self, key: ThreadKey) -> None:
        """Delete a thread, here and in the engine's stores as far as these let it."""
        try:
            self._engine.drop(key.thread, namespace=key.namespace, delete=True, erase=False)
        except Exception as error:
            self._on_failure("a thread could not be deleted from its stores", error)
        with self._lock:
            self._entries.pop(key, None)

    def _measure(self, entry: Entry, thread: Thread) -> None:
        sizes = _sizes(thread)
        with self._lock:
            self._note(entry, sizes)

    def _thread(self, entry: Entry) -> Thread:
        return self._engine.thread(entry.key.thread, namespace=entry.key.namespace)

    def _note(self, entry: Entry, sizes: tuple[int, int]) -> None:
        entry.live_bytes, entry.suspended_bytes = sizes
        entry.place = "live" if sizes[0] else "suspended" if sizes[1] else "stored"

    # What others are told

    def memory(self, tenant: str | None = None) -> tuple[int, int]:
        """Bytes of live and of suspended state; what threads share counts for each."""
        with self._lock:
            entries = self._of(tenant)
            return sum(e.live_bytes for e in entries), sum(e.suspended_bytes for e in entries)

    def places(self, tenant: str | None = None) -> Mapping[ThreadKey, Place]:
        """Where the state of each thread is."""
        with self._lock:
            return {
                entry.key: "answering" if entry.is_busy else entry.place
                for entry in self._of(tenant)
            }

    def _of(self, tenant: str | None) -> list[Entry]:
        entries = self._entries.values()
        return [entry for entry in entries if tenant is None or entry.tenant == tenant]

    def _bytes(self) -> int:
        return sum(self.memory())


def _key(tenant: str, name: str) -> ThreadKey:
    return ThreadKey(f"{_OURS}{quote(tenant, safe='')}/{name}")


def _sizes(thread: Thread) -> tuple[int, int]:
    """Bytes of a thread's live cache and of its suspended versions. Waits for a suspend."""
    stored = thread.sequence.versions.payload_bytes
    return thread.sequence.live_bytes, stored
