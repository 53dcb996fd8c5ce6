"""A stopwatch that splits a call's time into parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, get_args

Part = Literal["render", "wait", "history", "fetch", "planning", "restore", "recompute", "sampling"]
"""A part of the time to the first token; see `RecoveryReport`, where each is `{part}_ms`."""


class Stopwatch:
    """Splits the time since a call into parts.

    Parts are differences of consecutive marks of one clock, so they add up to the whole exactly.

    Args:
        clock_ns: nanoseconds, of any beginning.
        started_ns: when the call began, by that clock; now if left out.
    """

    def __init__(
        self, clock_ns: Callable[[], int] = time.perf_counter_ns, started_ns: int | None = None
    ) -> None:
        self._clock_ns = clock_ns
        self._last_ns = clock_ns() if started_ns is None else started_ns
        self._parts_ns: dict[Part, int] = dict.fromkeys(get_args(Part), 0)

    def mark(self, part: Part) -> None:
        """Count the time since the last mark, or since the call, as this part."""
        now = self._clock_ns()
        self._parts_ns[part] += now - self._last_ns
        self._last_ns = now

    def ms(self, *parts: Part) -> float:
        """Milliseconds of some parts together; of all of them if none is named."""
        return sum(self._parts_ns[part] for part in parts or self._parts_ns) / 1e6

    def report(self) -> dict[str, float]:
        """The times of a `RecoveryReport`, by field."""
        parts = {f"{part}_ms": self.ms(part) for part in self._parts_ns}
        resume_ms = self.ms("fetch", "restore", "recompute", "sampling")
        return {**parts, "resume_ttft_ms": resume_ms, "ttft_ms": self.ms()}
