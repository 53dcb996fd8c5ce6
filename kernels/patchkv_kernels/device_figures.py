"""Figures of the device checks, their table and their command line. Imports torch when called."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value or comparison of a report.

    Attributes:
        part: the part of the check it belongs to.
        name: what was measured or compared.
        value: the result, in `unit`.
        passed: whether it is within its limit; None for figures without one.
        note: what to compare the value with.
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

    Taken with device events on a GPU, with the process's clock elsewhere.
    """
    import torch

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


def report(figures: Iterable[Figure], *, device: str, file: Path | None = None) -> int:
    """Print the figures as they come and their table, write the file; returns the exit status."""
    import torch

    started = time.perf_counter()
    measured = []
    for figure in figures:
        measured.append(figure)
        elapsed = f"{time.perf_counter() - started:6.1f} s"
        print(f"{elapsed}  {figure.part}: {figure.name}", file=sys.stderr, flush=True)
    print(f"{device}, torch {torch.__version__}\n\n{table(measured)}")
    failed = [figure for figure in measured if figure.passed is False]
    if file is not None:
        document = {
            "device": device,
            "torch": torch.__version__,
            "seconds": time.perf_counter() - started,
            "passed": not failed,
            "figures": [figure.to_dict() for figure in measured],
        }
        file.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\n{len(failed)} of {sum(f.passed is not None for f in measured)} checks failed")
    return 1 if failed else 0


def run_check(
    arguments: Sequence[str] | None,
    title: str,
    figures_of: Callable[[torch.device, int], Iterable[Figure]],
) -> int:
    """Command line of a check; returns the exit status: 2 where there is no GPU and no `--cpu`.

    Args:
        arguments: after the program's name; those of the process where None.
        title: first line of the help.
        figures_of: measures on a device, with a context of so many tokens.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--cpu", action="store_true", help="everything in small on the CPU")
    parser.add_argument("--tokens", type=int, help="of the context; 10,000 on a GPU, 600 else")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    if options.cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which torch may do
    import torch

    if not options.cpu and not torch.cuda.is_available():
        print(
            "torch finds no CUDA GPU here. Run this on a machine with one (and torch's CUDA build),"
            " or try the check itself in small with --cpu.",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu" if options.cpu else "cuda")
    tokens = options.tokens or (600 if options.cpu else 10_000)
    name = "CPU, kernels interpreted" if options.cpu else torch.cuda.get_device_name()
    return report(figures_of(device, tokens), device=name, file=options.json)
