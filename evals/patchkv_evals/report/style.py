"""Figures by Matplotlib: rendered for white and for dark ground, without global state."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from patchkv_evals.errors import ReportError
from patchkv_evals.report.blocks import Picture
from patchkv_evals.report.methods import MethodStyle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
KL_FLOOR = 1e-6
"""Divergences below this are rounding; they are drawn here, since 0 has no place on a log axis."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one ground; `index` picks a method's colour."""

    index: int
    ground: str
    ink: str
    grid: str


LIGHT = Theme(0, "#ffffff", "#1f1f1f", "#dedede")
DARK = Theme(1, "#17191c", "#e4e4e4", "#3b3f45")

Draw: TypeAlias = Callable[["Figure", Theme], None]


def require_matplotlib() -> None:
    """Check that figures can be drawn.

    Raises:
        ReportError: Matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ReportError(
            "The report's figures need Matplotlib: pip install 'patchkv-agents[report]'."
        ) from error


def picture(name: str, alt: str, caption: str, draw: Draw, *, size: tuple[float, float]) -> Picture:
    """Draw a figure twice, for white and for dark ground; `size` in inches."""
    light, dark = (_render(draw, theme, size) for theme in (LIGHT, DARK))
    return Picture(name, alt, caption, light, dark, width=round(size[0] * 96))


def _render(draw: Draw, theme: Theme, size: tuple[float, float]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with _settings(theme):
        figure = Figure(figsize=size, dpi=DPI, layout=ConstrainedLayoutEngine(h_pad=0.08))
        FigureCanvasAgg(figure)
        draw(figure, theme)
        buffer = io.BytesIO()
        # No time stamp and version in it: the same figures give the same file.
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _settings(theme: Theme) -> AbstractContextManager[None]:
    from matplotlib import rc_context

    return rc_context(
        {
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.labelsize": 9,
            "legend.fontsize": 8.5,
            "legend.frameon": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": theme.grid,
            "grid.linewidth": 0.7,
            "figure.facecolor": theme.ground,
            "savefig.facecolor": theme.ground,
            "axes.facecolor": theme.ground,
            "axes.edgecolor": theme.ink,
            "axes.labelcolor": theme.ink,
            "text.color": theme.ink,
            "xtick.color": theme.ink,
            "ytick.color": theme.ink,
            # Text is data: a dollar in a name starts no formula.
            "text.parse_math": False,
        }
    )


def marker_options(style: MethodStyle, theme: Theme) -> dict[str, Any]:
    """Marker and colour of a method, for `plot` and `errorbar`."""
    colour = style.colours[theme.index]
    return {
        "color": colour,
        "marker": style.marker,
        "markerfacecolor": theme.ground if style.hollow else colour,
        "markeredgecolor": colour,
        "markeredgewidth": 1.4,
        "markersize": 7.5,
    }


def legend_below(
    figure: Figure, styles: Sequence[MethodStyle], theme: Theme, *, columns: int
) -> None:
    """One legend for all panels, under them."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="", label=style.name, **marker_options(style, theme))
        for style in styles
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def log_seconds(axes: Axes, low_ms: float, high_ms: float) -> None:
    """A log axis of times on x, in plain numbers at 1, 2 and 5 of each decade."""
    plain_log(axes, "x", low_ms / 1e3 / 1.6, high_ms / 1e3 * 1.6)


def plain_log(axes: Axes, which: str, low: float, high: float) -> None:
    """A log axis from low to high whose ticks at 1, 2 and 5 are plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    wide = high / low > 300
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def log_kl(axes: Axes, values: Sequence[float], which: str = "y") -> None:
    """A log axis of divergences whose lowest tick stands for all that is smaller."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    top = max([*values, 10 * KL_FLOOR])
    decades = [KL_FLOOR * 10**power for power in range(12) if KL_FLOOR * 10**power <= 10 * top]
    step = max(1, len(decades) // 5)
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(KL_FLOOR / 2, 3 * top)
    axis.set_major_locator(FixedLocator(decades[::step]))
    axis.set_minor_locator(NullLocator())
    floor = 1.01 * KL_FLOOR
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"≤ {_power(value)}" if value <= floor else _power(value))
    )


def _power(value: float) -> str:
    return f"1e{round(math.log10(value))}"


def drawn_kl(nats: float) -> float:
    """Where a divergence is drawn on `log_kl`'s axis."""
    return max(nats, KL_FLOOR)
