from __future__ import annotations

import numpy as np
import pytest

from patchkv_agents.errors import InputError
from patchkv_agents.estimates import (
    bootstrap,
    bootstrap_mean,
    paired_difference,
    paired_ratio,
    quantiles,
    summary,
)


def mean(figures: np.ndarray) -> float:
    return float(figures.mean())


def test_quantiles() -> None:
    assert quantiles([1, 2, 3, 4]) == [1.75, 2.5, 3.25]


def test_the_interval_of_a_mean_is_about_that_of_the_normal_distribution() -> None:
    figures = np.random.default_rng(1).normal(10, 2, size=400)
    found = bootstrap(figures, mean)
    half = 1.96 * figures.std() / np.sqrt(len(figures))
    assert found.estimate == figures.mean()
    assert found.low == pytest.approx(figures.mean() - half, abs=half / 10)
    assert found.high == pytest.approx(figures.mean() + half, abs=half / 10)
    assert found.n == 400


def test_the_seed_decides() -> None:
    figures = [1.0, 4.0, 9.0, 16.0, 25.0]
    assert bootstrap(figures, mean, seed=3) == bootstrap(figures, mean, seed=3)
    assert bootstrap(figures, mean, seed=3) != bootstrap(figures, mean, seed=4)


def test_figures_of_a_group_are_drawn_together() -> None:
    """The edits of one row are not independent; taking them for it makes intervals too narrow."""
    values = np.repeat(np.random.default_rng(2).normal(size=20), 8)
    groups = np.repeat(np.arange(20), 8).tolist()
    apart, together = bootstrap(values, mean), bootstrap(values, mean, groups=groups)
    width = (together.high - together.low) / (apart.high - apart.low)
    assert width == pytest.approx(np.sqrt(8), rel=0.1)
    assert together.estimate == apart.estimate


def test_pairing_removes_what_examples_have_in_common() -> None:
    reference = np.random.default_rng(5).normal(0, 10, size=50)
    method = reference + np.random.default_rng(6).normal(1, 0.1, size=50)
    found = paired_difference(method.tolist(), reference.tolist())
    assert found.estimate == pytest.approx(1, abs=0.05)
    assert found.high - found.low < 0.1


def test_ratio_of_medians() -> None:
    found = paired_ratio([1.0, 2.0, 3.0], [8.0, 6.0, 7.0])
    assert found.estimate == 3.5
    assert found.low <= 3.5 <= found.high
    assert paired_ratio([2.0, 3.0], [4.0, 6.0]).low == 2.0


def ratio_of_medians(pairs: np.ndarray) -> float:
    return float(np.median(pairs[:, 1]) / np.median(pairs[:, 0]))


@pytest.mark.parametrize("sizes", [(1,) * 9, (3, 3, 3), (1, 4, 2, 2), (9,)])
def test_resamples_taken_all_at_once_are_those_taken_one_by_one(sizes: tuple[int, ...]) -> None:
    """Even and odd sizes, equal figures among them, groups of one size and of several."""
    groups = np.repeat(np.arange(len(sizes)), sizes).tolist()
    pairs = np.random.default_rng(3).integers(1, 9, size=(9, 2)).astype(float)
    own, others = pairs.T.tolist()
    for grouping in (groups, None) if max(sizes) == 1 else (groups,):
        one_by_one = bootstrap(own, mean, groups=grouping)
        at_once = bootstrap_mean(own, groups=grouping)
        assert (at_once.low, at_once.high) == pytest.approx((one_by_one.low, one_by_one.high))
        one_by_one = bootstrap(pairs, ratio_of_medians, groups=grouping)
        at_once = paired_ratio(own, others, groups=grouping)
        assert (at_once.low, at_once.high) == (one_by_one.low, one_by_one.high)


def test_summary_has_the_fields_of_the_results_file() -> None:
    found = summary([0.0, 0.0, 1.0, 1.0])
    assert (found["median"], found["mean"], found["n"]) == (0.5, 0.5, 4)
    low, high = found["ci"]
    assert low <= 0.5 <= high


def test_what_cannot_be_summarised_is_an_error() -> None:
    with pytest.raises(InputError, match="no figures"):
        summary([])
    with pytest.raises(InputError, match="no pairs"):
        paired_difference([1.0], [1.0, 2.0])
    with pytest.raises(InputError, match="greater than 0"):
        paired_ratio([0.0, 1.0], [1.0, 1.0])
    with pytest.raises(InputError, match="one for each"):
        bootstrap([1.0, 2.0], mean, groups=["a"])
