"""What a benchmark found, as a JSON document and as a table's columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkv_agents.provenance import command_line, created, versions
from patchkv_evals.benchmarks.timing import Point
from patchkv_evals.provenance import SCHEMA, machine


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: its header, and what it says of a point."""

    header: str
    text: Callable[[Point], str]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Points, and how they were measured.

    Attributes:
        bench: name of the benchmark.
        config: its options.
        points: JSON objects; each benchmark's module describes its own.
        device: on which it ran.
        variant: distinguishes files of one benchmark in a folder.
    """

    bench: str
    config: Mapping[str, Any]
    points: Sequence[Point]
    device: str = "cpu"
    variant: str = ""

    def document(self) -> dict[str, Any]:
        """The points with command, versions and machine."""
        return {
            "schema": SCHEMA,
            "bench": self.bench,
            "command": command_line(),
            "created": created(),
            "config": dict(self.config),
            "versions": versions(),
            "machine": machine(self.device),
            "points": list(self.points),
        }

    def write(self, folder: Path) -> Path:
        """Write the document to `bench-<name>.json` in a folder, which is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        name = "-".join(filter(None, ("bench", self.bench, self.variant)))
        file = folder / f"{name}.json"
        file.write_text(json.dumps(self.document(), indent=1) + "\n", encoding="utf-8")
        return file


def spread(name: str) -> Callable[[Point], str]:
    """Text of a time: its median, and the smallest and largest round where there are several."""

    def text(point: Point) -> str:
        rounds, middle = point[f"{name}_rounds_ms"], point[f"{name}_ms"]
        digits = 0 if middle >= 100 else 1 if middle >= 10 else 2
        low, high = (f"{each:,.{digits}f}" for each in (min(rounds), max(rounds)))
        return f"{middle:,.{digits}f}" + (f" [{low}, {high}]" if len(rounds) > 1 else "")

    return text


def number(name: str, form: str = ",") -> Callable[[Point], str]:
    """Text of a field by a format specification; `-` where it is null."""
    return lambda point: "-" if point[name] is None else format(point[name], form)
