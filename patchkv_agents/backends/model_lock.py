"""Fair lock on a model. Whoever calls one model holds the same lock."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from weakref import WeakKeyDictionary


class ModelLock:
    """Reentrant lock that goes to whoever has waited longest.

    A plain lock is taken again at once by a thread that has just released it, so that one which
    decodes token after token keeps all others out.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        self._holder: int | None = None
        self._depth = 0

    @property
    def waiting(self) -> int:
        """Number of Python threads that wait."""
        return len(self._waiting)

    def __enter__(self) -> ModelLock:
        me = threading.get_ident()
        with self._guard:
            if self._holder in (None, me):
                self._holder = me
                self._depth += 1
                return self
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append((me, gate))
        try:
            gate.acquire()  # released by whoever hands the lock over
        except BaseException:  # Ctrl-C
            with self._guard:
                if (me, gate) in self._waiting:
                    self._waiting.remove((me, gate))
                else:
                    self._hand_over()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._guard:
            self._depth -= 1
            if not self._depth:
                self._hand_over()

    def _hand_over(self) -> None:
        """Give the lock to the next in line, if there is one. The guard is held."""
        self._holder, self._depth = None, 0
        if self._waiting:
            self._holder, gate = self._waiting.popleft()
            self._depth = 1
            gate.release()


_locks: WeakKeyDictionary[object, ModelLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


def model_lock(model: object) -> ModelLock:
    """The lock of a model, the same for all adapters and engines over it."""
    with _locks_guard:
        return _locks.setdefault(model, ModelLock())
