"""Timing: interleaved rounds, their medians, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

import torch

Point = dict[str, Any]
"""One point of a benchmark, as JSON."""

Report = Callable[[str], None]
"""Is told what runs next."""

Key = TypeVar("Key")
Result = TypeVar("Result")


def silent(_step: str) -> None:
    """Report nothing."""


class Steps:
    """Tells what runs next, and about how long the rest will take.

    Args:
        total: cost of all steps, in any unit.
        report: is told.
    """

    def __init__(self, total: float, report: Report) -> None:
        self._total = total
        self._report = report
        self._done = 0.0
        self._started = time.perf_counter()

    def next(self, what: str, cost: float = 1.0) -> None:
        """Say that a step begins; the one before it is over.

        Args:
            what: the step does.
            cost: of the step, in the unit of the total.
        """
        left = ""
        if self._done > 0:
            spent_s = time.perf_counter() - self._started
            left = f", about {spent_s * (self._total / self._done - 1):.0f} s left"
        self._report(f"{what}{left}")
        self._done += cost


def milliseconds(call: Callable[[], object], device: torch.device | None = None) -> float:
    """How long a call takes, work that it queues on a GPU included.

    Args:
        call: is called once.
        device: on which it works, if not on the CPU.
    """
    _finish(device)
    started = time.perf_counter()
    call()
    _finish(device)
    return (time.perf_counter() - started) * 1e3


def _finish(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(
    actions: Mapping[Key, Callable[[], Result]], rounds: int, *, warm_up: bool = True
) -> dict[Key, list[Result]]:
    """What each action returns in each round; a round runs every action once, in order.

    Args:
        actions: by name.
        rounds: that count.
        warm_up: whether a round that does not count runs first.
    """
    if warm_up:
        for action in actions.values():
            action()
    results: dict[Key, list[Result]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            results[name].append(action())
    return results


def timing(name: str, rounds_ms: Sequence[float]) -> Point:
    """The two fields of a time: its median, and all rounds."""
    return {f"{name}_ms": median(rounds_ms), f"{name}_rounds_ms": list(rounds_ms)}
