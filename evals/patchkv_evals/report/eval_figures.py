"""Figures of evaluation runs: quality against time, and the ablations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkv_agents.estimates import quantiles
from patchkv_evals.report.blocks import Picture
from patchkv_evals.report.methods import MethodStyle, in_order, style_of
from patchkv_evals.report.style import (
    Theme,
    drawn_kl,
    legend_below,
    log_kl,
    log_seconds,
    marker_options,
    picture,
)
from patchkv_evals.running.results import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of some figures."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one method lies; F1 as points of 100 with the interval of its mean."""

    style: MethodStyle
    n: int
    ttft_ms: Spread
    kl: Spread | None
    f1: tuple[float, float, float] | None


@dataclass(frozen=True, slots=True)
class Panel:
    """One run's methods, those that have a time."""

    title: str
    methods: tuple[Placed, ...]


def panel(title: str, records: Sequence[Record], summary: Mapping[str, Any]) -> Panel:
    """Quartiles from the lines of a run, means and their intervals from its summary."""
    placed = []
    for name in in_order(summary):
        own = [record["metrics"] for record in records if record["method"] == name]
        ttft = _spread(own, "resume_ttft_ms")
        if ttft is None:
            continue
        entry = summary[name].get("f1")
        f1 = None if entry is None else (entry["mean"], *entry["ci"])
        placed.append(
            Placed(
                style_of(name),
                len(own),
                ttft,
                _spread(own, "first_token_kl"),
                None if f1 is None else (100 * f1[0], 100 * f1[1], 100 * f1[2]),
            )
        )
    return Panel(title, tuple(placed))


def _spread(metrics: Sequence[Record], name: str) -> Spread | None:
    values = [metric[name] for metric in metrics if metric.get(name) is not None]
    return Spread(*quantiles(values)) if values else None


def quality_picture(name: str, model: str, panels: Sequence[Panel]) -> Picture:
    """F1 and divergence against time to first token, one column a run."""

    def draw(figure: Figure, theme: Theme) -> None:
        grid = figure.subplots(2, len(panels), squeeze=False, sharey="row")
        names: dict[str, MethodStyle] = {}
        for column, each in enumerate(panels):
            _quality_column(grid[0][column], grid[1][column], each, theme)
            names |= {method.style.name: method.style for method in each.methods}
        every = [method for each in panels for method in each.methods]
        tops = [method.f1[2] for method in every if method.f1]
        top = min(100, 1.15 * max(tops, default=100)) or 100
        # A little below 0, so that markers at 0 are whole.
        grid[0][0].set_ylim(-0.04 * top, 1.02 * top)
        log_kl(grid[1][0], [method.kl.high for method in every if method.kl])
        grid[0][0].set_ylabel("F1, points\n(mean, 95 % interval)")
        grid[1][0].set_ylabel("KL of the first token, nats\n(median, quartiles; log)")
        for axes in grid[1]:
            axes.set_xlabel("time to first token, s (median, quartiles; log)")
        styles = [names[key] for key in in_order(names)]
        legend_below(figure, styles, theme, columns=4 if len(panels) > 1 else 2)

    words = "; ".join(
        f"{each.title}: "
        + ", ".join(
            f"{method.style.name} {method.ttft_ms.median / 1e3:.2f} s"
            + (f" at F1 {method.f1[0]:.1f}" if method.f1 else "")
            for method in each.methods
        )
        for each in panels
    )
    return picture(
        name,
        f"Quality against time to first token on {model}. {words}",
        "Up and to the left is better in the upper row, down and to the left in the lower one. "
        "F1 starts at 0; divergences below 1e-6 are drawn at 1e-6.",
        draw,
        size=(3.0 + 3.2 * len(panels), 6.6),
    )


def _quality_column(upper: Axes, lower: Axes, each: Panel, theme: Theme) -> None:
    upper.set_title(each.title)
    for method in each.methods:
        options = marker_options(method.style, theme) | {"linestyle": "", "elinewidth": 1.1}
        x = method.ttft_ms.median / 1e3
        across = [[x - method.ttft_ms.low / 1e3], [method.ttft_ms.high / 1e3 - x]]
        if method.f1 is not None:
            mean, low, high = method.f1
            upper.errorbar(x, mean, xerr=across, yerr=[[mean - low], [high - mean]], **options)
        if method.kl is not None:
            y, low, high = (
                drawn_kl(value) for value in (method.kl.median, method.kl.low, method.kl.high)
            )
            lower.errorbar(x, y, xerr=across, yerr=[[y - low], [high - y]], **options)
    times = [value for m in each.methods for value in (m.ttft_ms.low, m.ttft_ms.high)]
    for axes in (upper, lower):
        log_seconds(axes, min(times), max(times))


def ablation_picture(name: str, model: str, each: Panel) -> Picture:
    """The methods under each other: time, divergence and F1 side by side."""
    methods = each.methods[::-1]

    def draw(figure: Figure, theme: Theme) -> None:
        time_axes, kl_axes, f1_axes = figure.subplots(1, 3, sharey=True)
        for row, method in enumerate(methods):
            options = marker_options(method.style, theme) | {"linestyle": "", "elinewidth": 1.1}
            ttft = method.ttft_ms
            _bar(time_axes, row, ttft.low / 1e3, ttft.median / 1e3, ttft.high / 1e3, options)
            if method.kl is not None:
                spread = method.kl
                _bar(
                    kl_axes,
                    row,
                    drawn_kl(spread.low),
                    drawn_kl(spread.median),
                    drawn_kl(spread.high),
                    options,
                )
            if method.f1 is not None:
                _bar(f1_axes, row, method.f1[1], method.f1[0], method.f1[2], options)
        time_axes.set_yticks(range(len(methods)), [method.style.name for method in methods])
        time_axes.set_ylim(-0.6, len(methods) - 0.4)
        time_axes.set_xlim(left=0)
        time_axes.set_xlabel("time to first token, s\n(median, quartiles)")
        log_kl(kl_axes, [method.kl.high for method in methods if method.kl], "x")
        kl_axes.set_xlabel("KL of the first token, nats\n(median, quartiles; log)")
        f1_axes.set_xlim(-3, 103)
        f1_axes.set_xlabel("F1, points\n(mean, 95 % interval)")

    words = "; ".join(
        f"{method.style.name} {method.ttft_ms.median / 1e3:.2f} s"
        + (f", KL {method.kl.median:.1e}" if method.kl else "")
        for method in each.methods
    )
    return picture(
        name,
        f"Ablations on {model}, {each.title}. {words}",
        "Left is better for time and KL, right for F1.",
        draw,
        size=(9.6, 1.5 + 0.32 * len(methods)),
    )


def _bar(
    axes: Axes, row: int, low: float, middle: float, high: float, options: dict[str, Any]
) -> None:
    axes.errorbar(middle, row, xerr=[[middle - low], [high - middle]], **options)
