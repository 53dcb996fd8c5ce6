"""What the device check reports: figures, their table, and how time is taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report.

    Attributes:
        part: of the check.
        name: what was measured or compared.
        value: the result, in `unit`.
        passed: whether it is within its limit; None for figures without one.
        note: what it is to be compared with.
    """

    part: str
    name: str
    value: float
    unit: str
    passed: bool | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The figure as JSON values."""
        return asdict(self)


def table(figures: Iterable[Figure]) -> str:
    """The figures as aligned text, one line each."""
    words = {True: "ok", False: "FAILED", None: ""}
    rows = [
        (
            figure.part,
            figure.name,
            f"{figure.value:,.4g} {figure.unit}",
            words[figure.passed],
            figure.note,
        )
        for figure in figures
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)).rstrip()
        for row in rows
    )


def median_ms(work: Callable[[], object], device: torch.device, *, rounds: int = 7) -> float:
    """Median time of `work` in milliseconds, after two calls to warm up.

    On a GPU the device's own clock around the queued work; elsewhere the process's.
    """
    work(), work()
    times: list[float] = []
    for _ in range(rounds):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            stop.record()
            stop.synchronize()
            times.append(float(start.elapsed_time(stop)))
        else:
            started = time.perf_counter()
            work()
            times.append((time.perf_counter() - started) * 1e3)
    return median(times)
