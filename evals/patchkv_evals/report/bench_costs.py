"""`patchkv bench align`, `plan` and `attention`: what recovery costs besides computing rows."""

from __future__ import annotations

from patchkv_agents.cli.console import plural
from patchkv_evals.report import numbers
from patchkv_evals.report.blocks import Block, table
from patchkv_evals.report.charts import Chart, Line, chart_picture
from patchkv_evals.report.methods import series_style
from patchkv_evals.report.points import plain, timed, timed_text, values_of
from patchkv_evals.report.sources import Bench

_TOKENS = "context, tokens (log)"
_RANGES = "Medians; bars reach from the fastest to the slowest round."
_STEPS = (
    ("align", "alignment of the two versions"),
    ("repair_set", "choosing the rows to compute"),
    ("aggregation", "attention scores"),
    ("precision_planning", "choosing the storage of blocks"),
    ("tagging", "of which from known errors"),
)


def plan_blocks(bench: Bench, name: str) -> list[Block]:
    """Time of each step of planning against length."""
    lines = tuple(
        Line(
            series_style(index, label),
            tuple(timed(point, step, point["tokens"]) for point in bench.points),
        )
        for index, (step, label) in enumerate(_STEPS)
    )
    chart = Chart(_TOKENS, "ms (log)", lines, "values", "log")
    picture = chart_picture(
        name, "Time of planning by length; the table below has the figures.", _RANGES, [chart]
    )
    rows = [
        (f"{point['tokens']:,}", *(timed_text(point, step) for step, _ in _STEPS))
        for point in bench.points
    ]
    return [picture, table(("tokens", *(label for _, label in _STEPS)), rows)]


def align_blocks(bench: Bench, name: str) -> list[Block]:
    """Time of alignment against length, a line for each number of hunks, a panel for each text."""
    charts = []
    for text in values_of(bench.points, "text"):
        points = [point for point in bench.points if point["text"] == text]
        lines = tuple(
            Line(
                series_style(index, plural(hunks, "changed place")),
                tuple(
                    timed(point, "align", point["tokens"])
                    for point in points
                    if point["hunks"] == hunks
                ),
            )
            for index, hunks in enumerate(values_of(bench.points, "hunks"))
        )
        charts.append(
            Chart(_TOKENS, "alignment, ms (log)", lines, "values", "log", f"text: {text}")
        )
    picture = chart_picture(
        name,
        "Time of alignment by length and number of changed places; the table has the figures.",
        _RANGES,
        charts,
    )
    rows = [
        (
            point["text"],
            f"{point['tokens']:,}",
            f"{point['hunks']:,}",
            f"{point['hunks_found']:,}",
            timed_text(point, "align"),
            timed_text(point, "plan"),
        )
        for point in bench.points
    ]
    headers = ("text", "tokens", "changed places", "found", "align [range]", "plan [range]")
    return [picture, table(headers, rows)]


def attention_blocks(bench: Bench, name: str) -> list[Block]:
    """What capturing attention scores adds to a prefill."""
    overhead = tuple(plain(point, "overhead", point["tokens"], scale=100) for point in bench.points)
    lines = [Line(series_style(0, "capture on − capture off"), overhead)]
    inside = [point for point in bench.points if point.get("observe_share") is not None]
    if inside:
        shares = tuple(
            plain(point, "observe_share", point["tokens"], scale=100) for point in inside
        )
        lines.append(Line(series_style(1, "inside capture's own calls"), shares))
    chart = Chart(_TOKENS, "% of a prefill", tuple(lines), "values", reference=0.0)
    picture = chart_picture(
        name,
        "Overhead of attention capture by length; the table below has the figures.",
        "What capture adds to a prefill. A difference of two medians can be negative where both "
        "are about equal; the time inside the capture's own calls cannot.",
        [chart],
    )
    rows = [
        (
            f"{point['tokens']:,}",
            timed_text(point, "prefill"),
            timed_text(point, "captured"),
            numbers.percent(point["overhead"]),
            numbers.percent(point.get("observe_share")),
        )
        for point in bench.points
    ]
    headers = ("tokens", "prefill [range]", "with capture [range]", "overhead", "inside capture")
    return [picture, table(headers, rows)]
