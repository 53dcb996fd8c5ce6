"""Progress of long work: what is reported, and how it is shown on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from patchkv_agents.console import new_console


@dataclass(frozen=True, slots=True)
class Progress:
    """Where long work stands.

    Attributes:
        doing: the step that begins now.
        done: steps that are finished.
        total: of all steps, as far as known; None where the work has no steps of equal size.
    """

    doing: str
    done: int = 0
    total: int | None = None


ProgressCallback = Callable[[Progress], None]
"""Called at the beginning of each step."""


def ignore_progress(progress: Progress) -> None:
    """The callback of work that nobody watches."""


@contextmanager
def show_progress(doing: str) -> Iterator[ProgressCallback]:
    """Show progress and time left on standard error: a bar in a terminal, else a line a step.

    Args:
        doing: the first step.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    from patchkv_agents.context.excerpts import escaped

    console = new_console(stderr=True)
    bars = Bars(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=float("inf"),  # steps may take minutes
    )
    with bars:
        bar = bars.add_task("", total=None)
        task = bars.tasks[0]

        def show(progress: Progress) -> None:
            text = escaped(progress.doing)
            bars.update(bar, description=text, completed=progress.done, total=progress.total)
            if console.is_terminal:
                return
            if progress.total is None:
                console.print(text)
                return
            left = task.time_remaining
            left_text = "" if left is None else f", about {_duration(left)} left"
            console.print(f"{progress.done} of {progress.total}: {text}{left_text}")

        show(Progress(doing))
        yield show


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
