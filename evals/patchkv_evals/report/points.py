"""Points of a benchmark's file: times with their rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from patchkv_evals.report import numbers
from patchkv_evals.report.charts import Dot

Point: TypeAlias = dict[str, Any]


def timed(point: Point, name: str, x: float = 0.0, *, scale: float = 1.0) -> Dot:
    """A time `<name>_ms` at x with its smallest and largest round, times `scale`."""
    middle = point[f"{name}_ms"]
    rounds = point.get(f"{name}_rounds_ms") or [middle]
    return Dot(x, scale * middle, scale * min(rounds), scale * max(rounds))


def plain(point: Point, name: str, x: float = 0.0, *, scale: float = 1.0) -> Dot:
    """A figure that has no rounds, times `scale`."""
    value = scale * point[name]
    return Dot(x, value, value, value)


def timed_text(point: Point, name: str) -> str:
    """A time and the range of its rounds."""
    if point.get(f"{name}_ms") is None:
        return numbers.NONE
    dot = timed(point, name)
    middle = numbers.duration(dot.y)
    if dot.low == dot.high:
        return middle
    return f"{middle} [{numbers.duration(dot.low)}, {numbers.duration(dot.high)}]"


def values_of(points: Sequence[Point], name: str) -> list[Any]:
    """The different values of a field, in the order in which they first come."""
    return list(dict.fromkeys(point[name] for point in points))
