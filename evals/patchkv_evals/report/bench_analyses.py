"""`patchkv bench selection` and `sensitivity`: which blocks are worth computing, or more bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from patchkv_agents.console import plural
from patchkv_agents.estimates import quantiles
from patchkv_evals.benchmarks.selection_summary import points_text, ratio_text, summed_up
from patchkv_evals.report import numbers
from patchkv_evals.report.blocks import Block, Rows, Table, few, table
from patchkv_evals.report.charts import Chart, Dot, Line, chart_picture
from patchkv_evals.report.intervals import Estimates, estimates_picture
from patchkv_evals.report.methods import series_style
from patchkv_evals.report.points import Point, values_of
from patchkv_evals.report.sources import Bench

_RULES: dict[str, str] = {
    "none": "nothing but new tokens and the last one",
    "base": "base: window and query tail",
    "attention": "+ most attended",
    "near_edit": "+ next behind the edit",
    "random": "+ random (mean of draws)",
    "low_attention": "+ least attended",
    "edited": "+ looked most at the edit",
    "combined": "+ looked at the edit × attended",
    "question": "+ most attended by the new tail",
    "true_drift": "+ largest drift (needs a full prefill)",
}
_ORDERS = (
    ("by their own divergence", "kl"),
    ("by risk", "risk"),
    ("by attention received", "attention"),
    ("by the error of 4-bit values", "error"),
)
_PLACES = 10


def selection_blocks(bench: Bench, name: str) -> list[Block]:
    """Gains over the base at equal budget: a figure over all edits, a table of each kind."""
    edits = values_of(bench.points, "edit")
    groups = [("all edits", bench.points)] if len(edits) > 1 else []
    groups += [(edit, [p for p in bench.points if p["edit"] == edit]) for edit in edits]
    lines = [(title, summed_up(points)) for title, points in groups]
    shown = [line for line in lines[0][1] if line["rule"] not in ("none", "base")]
    ratios = [line["kl_gain"] for line in shown]
    shares = [line["exact_gain"] for line in shown]
    panels = [
        Estimates(
            "KL of the base / KL (log)",
            tuple(Dot(0, 10**g.estimate, 10**g.low, 10**g.high) for g in ratios),
            none=1.0,
            log=True,
        ),
        Estimates(
            "exact continuations more than the base, points",
            tuple(Dot(0, 100 * g.estimate, 100 * g.low, 100 * g.high) for g in shares),
        ),
    ]
    names = [_rule(line) for line in shown]
    words = "; ".join(
        f"{label}: {ratio_text(line['kl_gain'])} times"
        for label, line in zip(names, shown, strict=True)
    )
    config = bench.config
    n = lines[0][1][0]["n"]
    caption = (
        f"{plural(n, 'context')} of {', '.join(map(str, edits))}. All rules compute new tokens, "
        f"{config['window']} tokens behind each edit and the last {config['tail']}, and "
        f"{config['budget']:.0%} of the suffix in blocks more. Geometric mean and mean, 95 % "
        "intervals; right of the dotted line is better than the base."
    )
    picture = estimates_picture(
        name,
        f"By how much blocks chosen by each rule lower the divergence. {words}",
        caption,
        names,
        panels,
    )
    note = few(n, "contexts")
    return [*([note] if note else []), picture, _selection_table(lines)]


def _rule(line: Point) -> str:
    rule = str(line["rule"])
    return _RULES.get(rule, rule)


def _selection_table(lines: Sequence[tuple[str, Sequence[Point]]]) -> Table:
    groups = tuple(
        Rows(
            tuple(
                (
                    _rule(line),
                    str(line["n"]),
                    numbers.percent(line["repair_ratio"]),
                    numbers.kl(line["kl_median"]),
                    ratio_text(line["kl_gain"]),
                    numbers.percent(line["exact"], 0),
                    points_text(line["exact_gain"]),
                )
                for line in own
            ),
            title,
        )
        for title, own in lines
    )
    headers = (
        "blocks computed",
        "contexts",
        "of the suffix (median)",
        "KL median",
        "base's KL / KL [95 %]",
        "exact continuation",
        "gain, points [95 %]",
    )
    return Table(headers, groups, "KL in nats, mean over the tokens of the exact answer")


def sensitivity_blocks(bench: Bench, name: str) -> list[Block]:
    """How concentrated the divergence is, who predicts it, and where sensitive blocks lie."""
    contexts = [point for point in bench.points if point["kind"] == "context"]
    blocks = [point for point in bench.points if point["kind"] == "block"]
    own = [[b for b in blocks if b["context"] == c["context"]] for c in contexts]
    lines = tuple(
        Line(series_style(index, label), _concentration(own, key))
        for index, (label, key) in enumerate(_ORDERS)
    )
    top = quantiles([context["top_kl"] for context in contexts], [0.0, 0.5, 1.0])
    format, n = bench.config["format"], plural(len(contexts), "context")
    concentration = chart_picture(
        name,
        f"Share of the divergence in the first blocks: the most sensitive tenth has "
        f"{top[1]:.0%} (median; {top[0]:.0%} to {top[2]:.0%}).",
        f"One block stored as {format}, all others exact; {n}, medians, bars are quartiles. The "
        "order is by divergence itself, or by what is known without trying: blocks whose "
        "attention is not known, at the end of the context, come first then.",
        [
            Chart(
                "first blocks, % of all",
                "share of the divergence, %",
                lines,
                from_zero=True,
            )
        ],
    )
    place = chart_picture(
        f"{name}-place",
        "Divergence from lowering one block, by its place in the context.",
        "Medians of the blocks in a tenth of the context; bars are quartiles.",
        [
            Chart(
                "middle of the block, % of the context",
                "KL of one block, nats (log)",
                (Line(series_style(0, "one block"), _by_place(blocks)),),
                y_scale="kl",
                from_zero=True,
            )
        ],
    )
    return [concentration, place, _sensitivity_table(contexts)]


def _concentration(contexts: Sequence[Sequence[Point]], key: str) -> tuple[Dot, ...]:
    """Share of the divergence, in %, in the blocks that come first by `key`, over contexts."""
    shares = np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0])
    curves = []
    for blocks in contexts:
        ordered = sorted(blocks, key=lambda block: (key != "kl" and block["scored"], -block[key]))
        kept = np.cumsum([0.0, *(block["kl"] for block in ordered)])
        at = np.linspace(0.0, 1.0, len(kept))
        curves.append(np.interp(shares, at, kept / (kept[-1] or 1.0)))
    dots = []
    for place, share in enumerate(shares):
        low, middle, high = quantiles([100 * curve[place] for curve in curves])
        dots.append(Dot(100 * share, middle, low, high))
    return tuple(dots)


def _by_place(blocks: Sequence[Point]) -> tuple[Dot, ...]:
    dots = []
    for place in range(_PLACES):
        own = [b["kl"] for b in blocks if int(_PLACES * b["place"]) == place]
        if own:
            low, middle, high = quantiles(own)
            dots.append(Dot(100 * (place + 0.5) / _PLACES, middle, low, high))
    return tuple(dots)


def _sensitivity_table(contexts: Sequence[Point]) -> Table:
    rows = [
        (
            point["context"],
            f"{point['tokens']:,}",
            f"{point['blocks']:,}",
            numbers.kl(point["total_kl"]),
            numbers.kl(point["joint_kl"]),
            *(numbers.percent(point[f"top_{key}"], 0) for _, key in _ORDERS),
            *(
                numbers.NONE if point[f"rank_{key}"] is None else f"{point[f'rank_{key}']:.2f}"
                for _, key in _ORDERS[1:]
            ),
        )
        for point in contexts
    ]
    headers = (
        "context",
        "tokens",
        "blocks",
        "KL, sum over blocks",
        "KL, all at once",
        "in the most sensitive tenth",
        "tenth by risk",
        "by attention",
        "by error",
        "rank correlation with risk",
        "with attention",
        "with error",
    )
    return table(headers, rows, caption="Share of the divergence in a tenth of the blocks")
