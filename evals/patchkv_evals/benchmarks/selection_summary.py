"""What the points of `patchkv bench selection` come to, rule by rule. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import Any

from patchkv_agents.estimates import Interval, paired_difference, quantiles

Point = dict[str, Any]

KL_FLOOR = 1e-7
"""Divergences below this are rounding: smaller ones count as this in ratios."""


def summed_up(points: Sequence[Point]) -> list[Point]:
    """The table's lines: each rule, `random` by the means of its draws, against the base.

    `rule`, `n`, `repair_ratio` (median), `kl_median`, `kl_gain` (of log10 KL, base minus rule, an
    `Interval` over contexts, rows of data drawn together), `exact` (share of exact continuations),
    `exact_gain` (an `Interval`: rule minus base).
    """
    contexts = list(dict.fromkeys((point["context"], point["row"]) for point in points))
    groups = [row or name for name, row in contexts]
    figures: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for point in points:
        figure = point["kl"], float(point["exact_continuation"]), point["repair_ratio"]
        figures.setdefault(point["rule"], {}).setdefault(point["context"], []).append(figure)
    means = {
        rule: [tuple(map(mean, zip(*own[name], strict=True))) for name, _ in contexts]
        for rule, own in figures.items()
    }
    logs = {
        rule: [math.log10(max(kl, KL_FLOOR)) for kl, _, _ in own] for rule, own in means.items()
    }
    exact = {rule: [share for _, share, _ in own] for rule, own in means.items()}
    return [
        {
            "rule": rule,
            "n": len(own),
            "repair_ratio": quantiles([ratio for _, _, ratio in own], [0.5])[0],
            "kl_median": quantiles([kl for kl, _, _ in own], [0.5])[0],
            "kl_gain": paired_difference(logs["base"], logs[rule], groups=groups),
            "exact": mean(exact[rule]),
            "exact_gain": paired_difference(exact[rule], exact["base"], groups=groups),
        }
        for rule, own in means.items()
    ]


def ratio_text(gain: Interval) -> str:
    """How many times smaller the base's KL became, with its interval."""
    low, high = 10**gain.low, 10**gain.high
    return f"{10**gain.estimate:.2f} [{low:.2f}, {high:.2f}]"


def points_text(gain: Interval) -> str:
    """A difference of shares in points, with its interval."""
    return f"{100 * gain.estimate:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
