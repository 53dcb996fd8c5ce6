"""`patchkv bench align`, `plan`, `attention`, `packing`: costs beside one thread's own rows."""

from __future__ import annotations

from patchkv_agents.console import plural
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
    """What capturing attention scores, and the block map, adds to a prefill."""
    named = {
        "overhead": "scores: capture on − capture off",
        "observe_share": "scores: inside capture's own calls",
        "mapped_overhead": "scores and block map: on − off",
        "mapped_share": "scores and block map: inside own calls",
    }
    lines: list[Line] = []
    for key, label in named.items():  # runs of before there was a map lack its figures
        inside = [point for point in bench.points if point.get(key) is not None]
        if inside:
            values = tuple(plain(point, key, point["tokens"], scale=100) for point in inside)
            lines.append(Line(series_style(len(lines), label), values))
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
            *(numbers.percent(point.get(key)) for key in named),
        )
        for point in bench.points
    ]
    headers = (
        "tokens",
        "prefill [range]",
        "with capture [range]",
        "overhead",
        "inside capture",
        "overhead with block map",
        "inside with map",
    )
    return [picture, table(headers, rows)]


def packing_blocks(bench: Bench, name: str) -> list[Block]:
    """Rows of several threads in turn and in one call: times and what one call could gain."""
    threads = bench.config["threads"]
    sides = (("in_turn", f"{threads} threads in turn"), ("packed", "all in one call"))
    times = tuple(
        Line(
            series_style(index, label),
            tuple(timed(point, key, point["rows"]) for point in bench.points),
        )
        for index, (key, label) in enumerate(sides)
    )
    gains = tuple(plain(point, "gain", point["rows"]) for point in bench.points)
    rows = "rows of each thread (log)"
    charts = [
        Chart(rows, "ms (log)", times, "log", "log"),
        Chart(
            rows,
            "in turn / in one call",
            (Line(series_style(2, "gain"), gains),),
            "log",
            reference=1.0,
        ),
    ]
    words = "; ".join(f"{point['rows']} rows: {point['gain']:.2f} times" for point in bench.points)
    picture = chart_picture(
        name,
        f"What packing the rows of {threads} threads into one call could gain, at most. {words}",
        f"{_RANGES} The gain is an upper bound: what attention costs more in pieces is left out.",
        charts,
    )
    cells = [
        (
            f"{point['rows']:,}",
            timed_text(point, "in_turn"),
            timed_text(point, "packed"),
            numbers.times(point["gain"]),
        )
        for point in bench.points
    ]
    headers = ("rows of each thread", "in turn [range]", "in one call [range]", "gain, at most")
    return [picture, table(headers, cells)]
