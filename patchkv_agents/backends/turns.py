"""Whose turn it is to use the model."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turns:
    """A lock that is given to whoever has waited longest. The holder may take it again.

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
        """How many are in line."""
        return len(self._waiting)

    def __enter__(self) -> Turns:
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
            gate.acquire()  # released by whoever hands the turn over
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
        """Give the turn to the next in line, if there is one. The guard is held."""
        self._holder, self._depth = None, 0
        if self._waiting:
            self._holder, gate = self._waiting.popleft()
            self._depth = 1
            gate.release()
