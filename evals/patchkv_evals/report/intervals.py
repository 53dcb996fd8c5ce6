"""Estimates with their intervals, one under the other, against a line that means no difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchkv_evals.report.blocks import Picture
from patchkv_evals.report.charts import Dot
from patchkv_evals.report.methods import series_style
from patchkv_evals.report.style import Theme, marker_options, picture, plain_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Estimates:
    """One panel; the first name on top.

    Attributes:
        values: of each name: estimate `y` and interval; `x` is not used.
        none: where the line stands.
        log: whether the axis is one of ratios.
    """

    x_label: str
    values: tuple[Dot, ...]
    none: float = 0.0
    log: bool = False


def estimates_picture(
    name: str, alt: str, caption: str, names: Sequence[str], panels: Sequence[Estimates]
) -> Picture:
    """Panels side by side; one row for each name."""

    def draw(figure: Figure, theme: Theme) -> None:
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        rows = range(len(names))
        options = marker_options(series_style(0, ""), theme) | {"linestyle": "", "capsize": 3}
        for axes, panel in zip(grid, panels, strict=True):
            values = panel.values
            around = [[v.y - v.low for v in values], [v.high - v.y for v in values]]
            axes.errorbar([v.y for v in values], rows, xerr=around, elinewidth=1.2, **options)
            axes.axvline(panel.none, color=theme.ink, linestyle=":", linewidth=1.0)
            if panel.log:
                low = min(panel.none, *(v.low for v in values))
                high = max(panel.none, *(v.high for v in values))
                plain_log(axes, "x", low / 1.2, high * 1.2)
            elif all(v.low == v.high == panel.none for v in values):
                axes.set_xlim(panel.none - 1, panel.none + 1)
            axes.set_xlabel(panel.x_label)
        grid[0].set_yticks(rows, names)
        grid[0].set_ylim(len(names) - 0.5, -0.5)

    return picture(name, alt, caption, draw, size=(2.2 + 3.4 * len(panels), 1.1 + 0.4 * len(names)))
