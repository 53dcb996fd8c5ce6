"""`patchkv bench resume`: time and divergence against length, place, size and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from patchkv_evals.report import numbers
from patchkv_evals.report.blocks import Block, Picture, Table, table
from patchkv_evals.report.charts import Chart, Dot, Line, Scale, chart_picture
from patchkv_evals.report.methods import PATCHKV, in_order, style_of
from patchkv_evals.report.points import Point, plain, timed, timed_text, values_of
from patchkv_evals.report.sources import Bench

_SWEEPS: dict[str, tuple[str, Scale]] = {
    "length": ("context, tokens (log)", "values"),
    "position": ("place of the edit, % of the context", "linear"),
    "edit_size": ("new tokens in the edit (log)", "values"),
    "attention": ("% of the suffix recomputed for its attention", "linear"),
    "block": ("block size, tokens (log)", "values"),
    "precision": ("storage", "names"),
}


def resume_blocks(bench: Bench, name: str) -> list[Block]:
    """Figure, fitted growth and table of one sweep."""
    sweep = bench.config["sweep"]
    blocks: list[Block] = [_picture(bench, sweep, name)]
    fits = bench.document.get("fits") or []
    if fits:
        blocks.append(_fits(fits))
    blocks.append(_table(bench.points, sweep))
    return blocks


def _picture(bench: Bench, sweep: str, name: str) -> Picture:
    x_label, x_scale = _SWEEPS.get(sweep, (sweep, "names"))
    points = bench.points
    values = [value for value in values_of(points, "value") if value is not None]
    names = tuple(str(value) for value in values) if x_scale == "names" else ()
    # Shares are the only values on a linear axis.
    factor = 100 if x_scale == "linear" else 1

    def x(point: Point) -> float:
        value = point["value"]
        if value is None:
            return 0.0
        return values.index(value) if names else factor * float(value)

    growth: Scale = "log" if sweep == "length" else "linear"
    log = " (log)" if growth == "log" else ""
    panels: list[tuple[str, Scale, Callable[[Point], Dot]]] = [
        ("speed-up over prefix cache", "linear", lambda p: plain(p, "speedup", x(p))),
        (f"time to first token, s{log}", growth, lambda p: timed(p, "ttft", x(p), scale=1e-3)),
        ("KL of the first token, nats (log)", "kl", lambda p: plain(p, "first_token_kl", x(p))),
    ]
    charts = [
        Chart(x_label, y_label, _lines(points, dot), x_scale, y_scale, x_names=names)
        for y_label, y_scale, dot in panels
    ]
    words = "; ".join(
        f"{point['method']} at {_value(point['value'], sweep)}: "
        f"{numbers.duration(point['ttft_ms'])}, speed-up {numbers.times(point['speedup'])}"
        for point in points
    )
    return chart_picture(
        name,
        f"Speed-up, time to first token and divergence by {sweep.replace('_', ' ')}. {words}",
        "Medians; bars reach from the fastest to the slowest round. A dashed line is a method that "
        "the sweep does not change.",
        charts,
    )


def _lines(points: Sequence[Point], dot: Callable[[Point], Dot]) -> tuple[Line, ...]:
    lines = []
    for method in in_order(point["method"] for point in points):
        own = [point for point in points if point["method"] == method]
        swept = tuple(dot(point) for point in own if point["value"] is not None)
        levels = [dot(point).y for point in own if point["value"] is None]
        lines.append(Line(style_of(method), swept, levels[0] if levels else None))
    return tuple(lines)


def _fits(fits: Sequence[Point]) -> Table:
    rows = [
        (
            fit["method"],
            f"{fit['exponent']:.2f}",
            numbers.duration(fit["ms_at_1000"]),
            numbers.percent(fit["residual"]),
        )
        for fit in fits
    ]
    return table(
        (
            "method",
            "grows as length to the power of",
            "at 1,000 tokens",
            "largest error of the fit",
        ),
        rows,
        caption="Growth of the time to first token with the context's length (fitted)",
        strong=(PATCHKV,),
    )


def _table(points: Sequence[Point], sweep: str) -> Table:
    rows = [
        (
            point["method"],
            _value(point["value"], sweep),
            f"{point['tokens']:,}",
            timed_text(point, "ttft"),
            numbers.times(point["speedup"]),
            numbers.kl(point["first_token_kl"]),
            numbers.percent(point["recompute_ratio"]),
            numbers.percent(point.get("payload_ratio")),
            numbers.duration(point.get("restore_ms")),
            numbers.duration(point.get("planning_ms")),
        )
        for point in points
    ]
    headers = (
        "method",
        sweep.replace("_", " "),
        "tokens",
        "TTFT [range]",
        "speed-up",
        "KL, nats",
        "rows computed",
        "payload of 16 bits",
        "restore",
        "planning",
    )
    return table(headers, rows, strong=(PATCHKV,))


def _value(value: float | str | None, sweep: str) -> str:
    if value is None:
        return numbers.NONE
    if sweep in ("attention", "position"):
        return numbers.percent(float(value))
    return f"{value:,}" if isinstance(value, int) else str(value)
