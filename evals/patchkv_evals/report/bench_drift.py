"""`patchkv bench drift`: how far old keys and values are off, by their distance from the edit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from patchkv_agents.console import plural
from patchkv_agents.estimates import quantiles
from patchkv_evals.report.blocks import Block, Table, table
from patchkv_evals.report.charts import Chart, Dot, Line, chart_picture
from patchkv_evals.report.methods import series_style
from patchkv_evals.report.points import Point, values_of
from patchkv_evals.report.sources import Bench

_DISTANCE = "tokens from the edit to the block's middle (log)"
_RANGES = ((0, 64), (64, 128), (128, 256), (256, 512), (512, 1024), (1024, 2048), (2048, 1 << 30))
_KINDS = (
    ("values", "value"),
    ("keys, moved to their new positions", "key"),
    ("keys, not moved", "key_unmoved"),
)


def drift_blocks(bench: Bench, name: str) -> list[Block]:
    """Relative error and 1 - cosine by distance, one row of panels for each kind of edit."""
    edits = values_of(bench.points, "edit")
    charts: list[Chart] = []
    for edit in edits:
        points = [point for point in bench.points if point["edit"] == edit]
        title = f"{edit}, {plural(len(values_of(points, 'context')), 'context')}"
        charts += [
            Chart(
                _DISTANCE,
                "relative L2 error",
                _lines(points, lambda point, kind: float(point[_field(kind, "drift")])),
                "log",
                title=title,
            ),
            Chart(
                _DISTANCE,
                "1 − cosine (log)",
                _lines(points, lambda point, kind: 1 - float(point[_field(kind, "cosine")])),
                "log",
                "kl",
                title=title,
            ),
        ]
    picture = chart_picture(
        name,
        "Drift of old values and keys from a full prefill's against the distance from the edit, "
        f"for {', '.join(map(str, edits))}; the table below has the figures.",
        "Medians of the blocks in a range of distances; bars are their quartiles. 0 is a state "
        "equal to a full prefill's.",
        charts,
        columns=2,
    )
    return [picture, _table(bench.points)]


def _field(kind: str, measure: str) -> str:
    what, _, unmoved = kind.partition("_")
    return f"{what}_{measure}_{unmoved}" if unmoved else f"{what}_{measure}"


def _ranges(points: Sequence[Point]) -> list[tuple[str, float, list[Point]]]:
    """Name, middle and blocks of each range of distances that has some."""
    found = []
    for low, high in _RANGES:
        own = [point for point in points if low <= point["distance"] < high]
        if own:
            middle = quantiles([p["distance"] + p["tokens"] / 2 for p in own], [0.5])[0]
            name = f"{low:,} and more" if high == 1 << 30 else f"{low:,} to {high:,}"
            found.append((name, middle, own))
    return found


def _lines(points: Sequence[Point], value: Callable[[Point, str], float]) -> tuple[Line, ...]:
    lines = []
    for index, (label, kind) in enumerate(_KINDS):
        dots = []
        for _, middle, own in _ranges(points):
            low, median, high = quantiles([value(point, kind) for point in own])
            dots.append(Dot(middle, median, low, high))
        lines.append(Line(series_style(index, label), tuple(dots)))
    return tuple(lines)


def _table(points: Sequence[Point]) -> Table:
    rows = []
    for edit in values_of(points, "edit"):
        for name, _, own in _ranges([point for point in points if point["edit"] == edit]):
            medians = [
                f"{quantiles([point[_field(kind, measure)] for point in own], [0.5])[0]:.4f}"
                for _, kind in _KINDS
                for measure in ("drift", "cosine")
            ]
            rows.append((str(edit), name, f"{len(own)}", *medians))
    headers = ["edit", "distance, tokens", "blocks"]
    for label in ("values", "keys moved", "keys not moved"):
        headers += [f"{label}: error", f"{label}: cosine"]
    return table(headers, rows, text_columns=2, caption="Medians over the blocks of a range")
