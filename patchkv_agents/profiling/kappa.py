"""The published rule by which the share of attention rows (kappa) is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from patchkv_agents.errors import InputError

KAPPAS = (0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05)
WITHIN_POINTS = 0.25


@dataclass(frozen=True, slots=True)
class KappaChoice:
    """What the rule chose.

    Attributes:
        kappa: the share.
        qualified: settings within `WITHIN_POINTS` of the best on every data set, ascending.
        worst_gap: of each setting, the largest distance from a data set's best, in points.
    """

    kappa: float
    qualified: tuple[float, ...]
    worst_gap: Mapping[float, float]


def choose_kappa(
    quality: Mapping[str, Mapping[float, float]],
    cost: Mapping[float, float],
    *,
    within: float = WITHIN_POINTS,
) -> KappaChoice:
    """Choose the cheapest setting that is about the best on every data set.

    Settings within 0.25 points of the best on every data set qualify, and the cheapest of them is
    taken. Where none qualifies, the worst distance of a data set from its best is made least
    first, and then the cost.

    Args:
        quality: of each data set and setting, in points (more is better).
        cost: of each setting, such as its mean resume TTFT.
        within: points.

    Raises:
        InputError: there is no data set, or one has not all settings.
    """
    if not quality or any(set(each) != set(cost) for each in quality.values()):
        raise InputError("give each data set the quality of every setting")
    best = {dataset: max(each.values()) for dataset, each in quality.items()}
    worst = {
        kappa: max(best[dataset] - each[kappa] for dataset, each in quality.items())
        for kappa in sorted(cost)
    }
    # Points are sums of floats: what is equal to a limit by hand may be a little above it.
    qualified = tuple(kappa for kappa, gap in worst.items() if gap <= within + 1e-9)
    if qualified:
        chosen = min(qualified, key=lambda kappa: (cost[kappa], kappa))
    else:
        chosen = min(worst, key=lambda kappa: (round(worst[kappa], 9), cost[kappa], kappa))
    return KappaChoice(chosen, qualified, worst)
