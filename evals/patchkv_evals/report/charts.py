"""Panels of lines and bars, as most benchmarks need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from patchkv_evals.report.blocks import Picture
from patchkv_evals.report.methods import MethodStyle, series_style
from patchkv_evals.report.style import (
    Theme,
    drawn_kl,
    legend_below,
    log_kl,
    marker_options,
    picture,
    plain_log,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Scale: TypeAlias = Literal["linear", "log", "values", "kl", "names"]
"""`values` is a log axis with ticks at the values, `kl` one of divergences."""


@dataclass(frozen=True, slots=True)
class Dot:
    """A figure at x, with the smallest and largest where they are known."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Line:
    """Figures of one method or kind, joined; or a `level`, if it has one, for all x."""

    style: MethodStyle
    dots: tuple[Dot, ...]
    level: float | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """One panel.

    Attributes:
        x_names: what to write at x = 0, 1, ... where `x_scale` is `names`.
        reference: y of a dotted line, such as 1 for ratios.
        from_zero: a linear x axis starts at 0.
    """

    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    title: str = ""
    x_names: tuple[str, ...] = ()
    reference: float | None = None
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """One panel of horizontal bars from 0, the first name on top."""

    x_label: str
    values: tuple[Dot, ...]
    texts: tuple[str, ...]


def chart_picture(
    name: str, alt: str, caption: str, charts: Sequence[Chart], *, columns: int = 3
) -> Picture:
    """Panels of the same lines in rows of `columns`, and under them one legend."""
    columns = min(columns, len(charts))
    rows = -(-len(charts) // columns)

    def draw(figure: Figure, theme: Theme) -> None:
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        names = {line.style.name: line.style for line in charts[0].lines}
        for axes, chart in zip(grid, charts, strict=False):
            _draw_chart(axes, chart, theme)
        for axes in grid[len(charts) :]:
            axes.set_visible(False)
        if len(names) > 1:
            legend_below(figure, list(names.values()), theme, columns=min(4, 2 * columns))

    return picture(name, alt, caption, draw, size=(2.0 + 3.3 * columns, 0.9 + 3.1 * rows))


def _draw_chart(axes: Axes, chart: Chart, theme: Theme) -> None:
    floor = drawn_kl if chart.y_scale == "kl" else float
    for line in chart.lines:
        options = marker_options(line.style, theme) | {"markersize": 6, "linewidth": 1.3}
        if line.level is not None:
            colour = line.style.colours[theme.index]
            y = floor(line.level)
            axes.axhline(y, color=colour, linestyle=(0, (5, 2)), linewidth=1.3)
            # The marker at its end tells which method it is without its colour.
            axes.plot([1], [y], transform=axes.get_yaxis_transform(), clip_on=False, **options)
        if line.dots:
            x = [dot.x for dot in line.dots]
            middle = [floor(dot.y) for dot in line.dots]
            below = [floor(dot.y) - floor(dot.low) for dot in line.dots]
            above = [floor(dot.high) - floor(dot.y) for dot in line.dots]
            axes.errorbar(x, middle, yerr=[below, above], elinewidth=1.0, capsize=2, **options)
    if chart.reference is not None:
        axes.axhline(chart.reference, color=theme.ink, linestyle=":", linewidth=1.0)
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    _scale_x(axes, chart)
    _scale_y(axes, chart)


def _scale_x(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import FixedLocator

    places = sorted({dot.x for line in chart.lines for dot in line.dots})
    if chart.x_scale == "names":
        axes.set_xticks(range(len(chart.x_names)), chart.x_names)
        axes.set_xlim(-0.5, len(chart.x_names) - 0.5)
    elif chart.x_scale in ("log", "values") and places and places[0] > 0:
        plain_log(axes, "x", places[0] / 1.25, places[-1] * 1.25)
        if chart.x_scale == "values" and len(places) <= 6:
            axes.xaxis.set_major_locator(FixedLocator(places))
    elif chart.from_zero:
        axes.set_xlim(0, 1.08 * max(places, default=1))


def _scale_y(axes: Axes, chart: Chart) -> None:
    values = [value for line in chart.lines for dot in line.dots for value in (dot.low, dot.high)]
    values += [line.level for line in chart.lines if line.level is not None]
    if chart.y_scale == "kl":
        log_kl(axes, values)
    elif chart.y_scale == "log" and values and min(values) > 0:
        plain_log(axes, "y", min(values) / 1.4, max(values) * 1.4)
    elif values:
        axes.set_ylim(min(0.0, 1.1 * min(values)), max(0.0, 1.1 * max(values)) or 1.0)


def bars_picture(
    name: str, alt: str, caption: str, names: Sequence[str], panels: Sequence[Bars]
) -> Picture:
    """Bars of several quantities side by side; one row for each name."""

    def draw(figure: Figure, theme: Theme) -> None:
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        rows = range(len(names))
        colour = series_style(0, "").colours[theme.index]
        for axes, bars in zip(grid, panels, strict=True):
            axes.barh(rows, [value.y for value in bars.values], 0.62, color=colour, alpha=0.75)
            for row, value in zip(rows, bars.values, strict=True):
                if value.low < value.high:
                    around = [[value.y - value.low], [value.high - value.y]]
                    axes.errorbar(
                        value.y, row, xerr=around, color=theme.ink, elinewidth=1, capsize=2
                    )
            longest = max(value.high for value in bars.values)
            for row, (value, text) in enumerate(zip(bars.values, bars.texts, strict=True)):
                axes.text(value.high + 0.02 * longest, row, text, va="center", fontsize=8.5)
            axes.set_xlim(0, 1.3 * longest or 1.0)
            axes.set_xlabel(bars.x_label)
            axes.grid(visible=False, axis="y")
        grid[0].set_yticks(rows, names)
        grid[0].invert_yaxis()

    return picture(name, alt, caption, draw, size=(1.2 + 3.9 * len(panels), 1.1 + 0.4 * len(names)))
