"""Medians, quantiles and bootstrap intervals, seeded.

Intervals are percentile intervals (Efron and Tibshirani, An Introduction to the Bootstrap, ch. 13).
Figures that belong together (the methods on one example, the edits of one row) are drawn together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from patchkv_agents.errors import InputError

Floats = npt.NDArray[np.float64]
Statistic = Callable[[Floats], float]
"""Maps figures [n], or [n, methods], to one number."""

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval, from n figures."""

    estimate: float
    low: float
    high: float
    n: int


def quantiles(values: Sequence[float], shares: Sequence[float] = (0.25, 0.5, 0.75)) -> list[float]:
    """The quantiles at some shares between 0 and 1, linear between neighbours.

    Raises:
        InputError: there are no values.
    """
    return [float(value) for value in np.quantile(_figures(values), shares)]


def summary(
    values: Sequence[float], *, groups: Sequence[Hashable] | None = None, seed: int = 0
) -> dict[str, Any]:
    """One metric's entry in `summary.json`: median, mean, interval of the mean, n.

    Raises:
        InputError: there are no values, or not as many groups.
    """
    mean = bootstrap_mean(values, groups=groups, seed=seed)
    return {
        "median": quantiles(values, [0.5])[0],
        "mean": mean.estimate,
        "ci": [mean.low, mean.high],
        "n": mean.n,
    }


def bootstrap_mean(
    values: Sequence[float],
    *,
    groups: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """The mean and its interval.

    Raises:
        InputError: there are no values, or not as many groups.
    """
    return bootstrap(values, _mean, groups=groups, confidence=confidence, seed=seed)


def paired_difference(
    method: Sequence[float],
    reference: Sequence[float],
    *,
    groups: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Mean of the differences, method minus reference, example by example.

    Raises:
        InputError: there are no values, or the lengths differ.
    """
    pairs = _pairs(method, reference)
    return bootstrap(
        pairs[:, 0] - pairs[:, 1], _mean, groups=groups, confidence=confidence, seed=seed
    )


def paired_ratio(
    method: Sequence[float],
    reference: Sequence[float],
    *,
    groups: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Median of the reference over median of the method: how many times faster the method is.

    Raises:
        InputError: there are no values, the lengths differ, or one is not greater than 0.
    """
    pairs = _pairs(method, reference)
    if pairs.min() <= 0:
        raise InputError("A ratio of medians needs figures greater than 0, such as times.")
    return bootstrap(pairs, _median_ratio, groups=groups, confidence=confidence, seed=seed)


def bootstrap(
    values: Sequence[float] | Floats,
    statistic: Statistic,
    *,
    groups: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Confidence interval of a statistic by resampling with replacement.

    Args:
        values: figures [n], or [n, methods] of examples measured with several methods.
        statistic: computed on each resample.
        groups: which figures belong together, such as row ids [n]: groups are drawn, not figures.
        confidence: of the interval, between 0 and 1.
        resamples: how many.
        seed: the same seed gives the same interval.

    Raises:
        InputError: there are no values, or not as many groups.
    """
    figures = _figures(values)
    rng = np.random.default_rng(seed)
    members = None if groups is None else _members(groups, len(figures))
    count = len(figures) if members is None else len(members)
    draws = rng.integers(count, size=(resamples, count))
    if statistic in _AT_ONCE:
        found = _AT_ONCE[statistic](figures, _times_drawn(draws, members, len(figures)))
    else:
        found = np.empty(resamples)
        for place, draw in enumerate(draws):
            if members is not None:
                draw = np.concatenate([members[index] for index in draw])
            found[place] = statistic(figures[draw])
    tail = (1 - confidence) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    return Interval(statistic(figures), float(low), float(high), len(figures))


def _times_drawn(
    draws: npt.NDArray[np.int64], members: list[npt.NDArray[np.intp]] | None, count: int
) -> npt.NDArray[np.int64]:
    """How often each figure is in each resample, `[resamples, figures]`."""
    resamples, groups = draws.shape
    offsets = np.arange(resamples)[:, None] * groups
    times = np.bincount((draws + offsets).ravel(), minlength=resamples * groups)
    times = times.reshape(resamples, groups)
    if members is None:
        return times
    group_of = np.empty(count, dtype=np.intp)
    for group, indices in enumerate(members):
        group_of[indices] = group
    return times[:, group_of]


def _members(groups: Sequence[Hashable], count: int) -> list[npt.NDArray[np.intp]]:
    """Indices of the figures of each group."""
    if len(groups) != count:
        raise InputError(f"{count} figures have {len(groups)} groups; give one for each.")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return [np.array(indices) for indices in members.values()]


def _figures(values: Sequence[float] | Floats) -> Floats:
    figures = np.asarray(values, dtype=np.float64)
    if not len(figures):
        raise InputError("There are no figures to summarise; see the failures of the run.")
    return figures


def _pairs(method: Sequence[float], reference: Sequence[float]) -> Floats:
    if len(method) != len(reference):
        raise InputError(
            f"{len(method)} and {len(reference)} figures make no pairs; pass those of the same "
            "examples, in the same order."
        )
    return np.column_stack([_figures(method), _figures(reference)])


def _mean(figures: Floats) -> float:
    return float(figures.mean())


def _median_ratio(pairs: Floats) -> float:
    method, reference = np.median(pairs, axis=0)
    return float(reference / method)


def _means(figures: Floats, times: npt.NDArray[np.int64]) -> Floats:
    """`_mean` of each resample."""
    means: Floats = times @ figures / times.sum(axis=1)
    return means


def _median_ratios(pairs: Floats, times: npt.NDArray[np.int64]) -> Floats:
    """`_median_ratio` of each resample."""
    method, reference = (_medians(figures, times) for figures in pairs.T)
    return reference / method


def _medians(figures: Floats, times: npt.NDArray[np.int64]) -> Floats:
    """The median of each resample, from how often it has each figure."""
    order = figures.argsort()
    upto = times[:, order].cumsum(axis=1)
    size = upto[:, -1:]
    middle = [(upto > place).argmax(axis=1) for place in ((size - 1) // 2, size // 2)]
    medians: Floats = figures[order][np.stack(middle)].mean(axis=0)
    return medians


_AT_ONCE: dict[Statistic, Callable[[Floats, npt.NDArray[np.int64]], Floats]] = {
    _mean: _means,
    _median_ratio: _median_ratios,
}
"""Statistics that are computed of all resamples at once, which is a hundred times faster."""
