"""The report's two charts: divergence against time, and divergence by kind of edit."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from patchkv_agents.estimates import quantiles
from patchkv_evals.errors import ReportError
from patchkv_evals.report.blocks import Picture
from patchkv_evals.report.methods import in_order, style_of
from patchkv_evals.running.results import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 150
_SIZE = (7.6, 5.0)  # inches
KL_FLOOR = 1e-6
"""Divergences below this are rounding; they are drawn here, since 0 has no place on a log axis."""


def require_matplotlib() -> None:
    """Check that charts can be drawn.

    Raises:
        ReportError: Matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ReportError(
            "The report's charts need Matplotlib: pip install 'patchkv-agents[report]'."
        ) from error


def speed_chart(name: str, model: str, records: Sequence[Record]) -> Picture:
    """KL of the first token against time to first token, a point for each method."""
    places = {}
    for method in in_order(record["method"] for record in records):
        own = [record["metrics"] for record in records if record["method"] == method]
        times = [1e-3 * each["resume_ttft_ms"] for each in own if each["resume_ttft_ms"]]
        kls = [max(each["first_token_kl"], KL_FLOOR) for each in own]
        if times and kls:
            places[method] = quantiles(times), quantiles(kls)

    def draw(axes: Axes) -> None:
        for method, (times, kls) in places.items():
            _point(axes, method, times, kls)
        axes.set_xscale("log")
        axes.set_xlabel("time to first token, s (median, quartiles; log)")
        axes.set_ylabel("KL of the first token, nats (median, quartiles; log)")

    words = "; ".join(
        f"{method} {times[1]:.2f} s, KL {kls[1]:.1e}" for method, (times, kls) in places.items()
    )
    return _picture(
        name,
        f"Divergence against time to first token on {model}. {words}",
        "All data sets and edits; down and to the left is better. Divergences below 1e-6 are drawn "
        "at 1e-6.",
        draw,
    )


def edit_chart(name: str, model: str, by_edit: Mapping[str, Mapping[str, Any]]) -> Picture:
    """Mean KL of each method for each kind of edit.

    Args:
        name: of the picture's file.
        model: which the alternative text names.
        by_edit: edit, then method, then metrics, as in `summary.json`.
    """
    edits = list(by_edit)
    methods = in_order(method for entries in by_edit.values() for method in entries)

    def draw(axes: Axes) -> None:
        for index, method in enumerate(methods):
            shift = 0.6 * (index / max(1, len(methods) - 1) - 0.5)
            for place, edit in enumerate(edits):
                entry = by_edit[edit].get(method, {}).get("first_token_kl")
                if entry is not None:
                    low, high = entry["ci"]
                    values = [max(v, KL_FLOOR) for v in (low, entry["mean"], high)]
                    _point(axes, method, [place + shift] * 3, values)
        axes.set_xticks(range(len(edits)), edits, rotation=20)
        axes.set_ylabel("KL of the first token, nats (mean, 95 % interval; log)")

    worst = {
        method: max(
            entries[method]["first_token_kl"]["mean"]
            for entries in by_edit.values()
            if "first_token_kl" in entries.get(method, {})
        )
        for method in methods
        if any("first_token_kl" in entries.get(method, {}) for entries in by_edit.values())
    }
    words = "; ".join(f"{method} {kl:.1e}" for method, kl in worst.items())
    return _picture(
        name,
        f"Mean divergence by kind of edit on {model}; of each method's worst kind: {words}",
        "Lower is better; a method is as good as its worst kind of edit.",
        draw,
    )


def _picture(name: str, alt: str, caption: str, draw: Callable[[Axes], None]) -> Picture:
    return Picture(name, alt, caption, _render(draw), width=round(_SIZE[0] * 96))


def _render(draw: Callable[[Axes], None]) -> bytes:
    """The chart as PNG, drawn without global state."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Text is data: a dollar in a name starts no formula.
    with rc_context({"font.size": 9, "legend.frameon": False, "text.parse_math": False}):
        figure: Figure = Figure(figsize=_SIZE, dpi=_DPI, layout=ConstrainedLayoutEngine())
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#dedede", linewidth=0.7)
        axes.set_axisbelow(True)
        draw(axes)
        axes.set_yscale("log")
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(unique.values(), unique, loc="outside lower center", ncols=4)
        buffer = io.BytesIO()
        # No time stamp and version in it: the same figures give the same file.
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _point(axes: Axes, method: str, x: Sequence[float], y: Sequence[float]) -> None:
    """A method's marker with bars; `x` and `y` are low end, middle and high end."""
    style = style_of(method)
    axes.errorbar(
        x[1],
        y[1],
        xerr=[[x[1] - x[0]], [x[2] - x[1]]],
        yerr=[[y[1] - y[0]], [y[2] - y[1]]],
        color=style.color,
        marker=style.marker,
        linestyle="",
        elinewidth=1.1,
        label=method,
    )
