"""Oracle boundaries by hand, the regression, its fallbacks, and coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from patchkv_agents.alignment import align
from patchkv_agents.profiling.drift import BlockDrift
from patchkv_agents.profiling.windows import (
    ALL_FEATURES_FROM,
    Observation,
    coverage,
    distinct,
    fit_window,
    mean_tokens,
    observations,
    oracle_boundary,
    sweep,
)
from patchkv_agents.recovery.methods.window import FEATURES


def observation(
    drifts: list[float], *, pair: str = "p", old: int = 10, new: int = 10, step: int = 32
) -> Observation:
    blocks = tuple((number * step, drift) for number, drift in enumerate(drifts))
    tokens = len(drifts) * step
    return Observation(pair, old, new, tokens, tokens, blocks)


@pytest.mark.parametrize(
    ("drifts", "share", "boundary"),
    [
        ([0.5, 0.5, 0.1, 0.1], 1.0, 64),
        ([0.1, 0.1, 0.1, 0.1], 1.0, 0),
        ([0.5, 0.1, 0.5, 0.1], 1.0, 96),
        ([0.5, 0.1, 0.5, 0.1], 0.66, 32),  # two of three blocks from 32 on
        ([0.5, 0.1, 0.5, 0.1], 0.5, 0),
        ([0.1, 0.1, 0.1, 0.5], 1.0, 128),  # the last block is dirty: nothing will do
        ([0.2, 0.2, 0.2, 0.2], 1.0, 0),  # at the limit is within it
    ],
)
def test_the_boundary_is_the_least_from_which_on_enough_blocks_are_clean(drifts, share, boundary):
    assert oracle_boundary(observation(drifts), drift=0.2, share=share) == boundary


def test_the_boundary_need_not_leave_the_rest_of_the_blocks_clean_one_by_one():
    """The share is of all blocks behind the boundary: a later dirty one may be outweighed."""
    drifts = [0.5, 0.1, 0.1, 0.1, 0.5, 0.1, 0.1]
    assert oracle_boundary(observation(drifts), drift=0.2, share=0.8) == 32


def test_each_edit_has_what_lies_behind_it_up_to_the_next_one():
    old = np.arange(1000)
    new = np.concatenate([old[:100], [5000] * 7, old[120:150], [6000], old[150:400], old[410:]])
    alignment = align(old, new)
    assert [(h.new_start, h.new_stop) for h in alignment.hunks] == [
        (100, 107),
        (137, 138),
        (388, 388),
    ]
    blocks = [
        BlockDrift(107, 128, 0, 0, {"value_drift": 0.9}),
        BlockDrift(138, 160, 1, 0, {"value_drift": 0.5}),
        BlockDrift(160, 192, 1, 22, {"value_drift": 0.1}),
        BlockDrift(388, 416, 2, 0, {"value_drift": 0.2}),
    ]
    first, second = observations("p", alignment, blocks)  # the first stretch is too short
    assert (first.old, first.new, first.suffix, first.stretch) == (0, 1, 840, 250)
    assert first.blocks == ((0, 0.5), (22, 0.1))
    assert (second.old, second.new, second.suffix, second.stretch) == (10, 0, 590, 590)
    assert Observation.from_json(first.to_json()) == first


def test_an_exact_law_is_found_again():
    """log1p(boundary) is linear in the suffix here, up to the blocks' grid of one token."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(60):
        blocks = int(rng.integers(200, 2000))
        boundary = round(math.expm1(0.5 * math.log1p(blocks) + 1.0))
        drifts = [0.9] * boundary + [0.0] * (blocks - boundary)
        sizes = rng.integers(5, 400, 2)
        found.append(
            observation(drifts, pair=str(number), old=int(sizes[0]), new=int(sizes[1]), step=1)
        )
    fit = fit_window(found, drift=0.2, share=1.0, quantile=0.9)
    assert fit.features == FEATURES and fit.note == ""
    lengths = fit.model.lengths(*(np.array([v]) for v in (50, 60, 1000)))
    assert lengths[0] == pytest.approx(math.expm1(0.5 * math.log1p(1000) + 1.0), rel=0.03)
    held = coverage(fit, found)
    assert held["pairs"] >= 0.85 and held["n_pairs"] == 60


def test_an_upper_quantile_covers_that_share_of_what_it_was_fitted_to():
    rng = np.random.default_rng(1)
    found = []
    for number in range(100):
        blocks, dirty = int(rng.integers(40, 80)), int(rng.integers(0, 30))
        drifts = [0.9] * dirty + [0.0] * (blocks - dirty)
        old, new = (int(each) for each in rng.integers(5, 400, 2))
        found.append(observation(drifts, pair=str(number), old=old, new=new))
    for quantile in (0.5, 0.9):
        fit = fit_window(found, drift=0.2, share=1.0, quantile=quantile)
        assert coverage(fit, found)["pairs"] == pytest.approx(quantile, abs=0.08)


def test_few_observations_get_fewer_parameters_and_say_so():
    drifts = [0.9] * 2 + [0.0] * 30
    few = [observation(drifts, pair=str(n)) for n in range(5)]
    fit = fit_window(few, drift=0.2, share=1.0, quantile=0.9)
    assert fit.features == () and "5 observations are fewer" in fit.note
    assert fit.model.lengths(*(np.array([v]) for v in (1, 1, 5000)))[0] == 64
    some = [observation([0.9] + [0.0] * (10 * n), pair=str(n)) for n in range(1, 13)]
    assert fit_window(some, drift=0.2, share=1.0, quantile=0.9).features == ("suffix",)


def test_equal_edits_in_suffixes_of_one_length_give_one_length():
    """Columns that do not vary would make the regression singular."""
    same = [
        observation([0.9] * (n % 3) + [0.0] * 20, pair=str(n)) for n in range(ALL_FEATURES_FROM)
    ]
    same = [Observation(o.pair, 10, 10, 640, 640, o.blocks) for o in same]
    fit = fit_window(same, drift=0.2, share=1.0, quantile=0.9)
    assert fit.features == () and "hardly vary" in fit.note
    assert fit.mean_tokens == 64


def test_a_pair_of_many_edits_counts_as_one():
    many = [observation([0.9] * 10 + [0.0], pair="many") for _ in range(6)]
    single = [observation([0.0] * 11, pair=str(n)) for n in range(3)]
    fit = fit_window(many + single, drift=0.2, share=1.0, quantile=0.7)
    assert fit.mean_tokens == 0  # three of four pairs are clean


def test_coverage_tells_what_is_missing_and_what_is_too_much():
    fit = fit_window([observation([0.9] * 3 + [0.0] * 20)], drift=0.2, share=1.0, quantile=0.9)
    held = coverage(
        fit,
        [
            observation([0.9] * 2 + [0.0] * 20, pair="a"),
            observation([0.9] * 5 + [0.0] * 20, pair="b"),
            observation([0.0] * 20, pair="b"),
        ],
    )
    assert (held["pairs"], held["edits"], held["n_edits"]) == (0.5, 0.75, 3)
    assert (held["extra_tokens"], held["missing_tokens"]) == ((32 + 96) / 2, 64 / 2)
    assert coverage(fit, [])["pairs"] is None


def test_the_sweep_is_in_order_and_thinned_to_distinct_windows():
    found = [
        observation([0.5, 0.4, 0.3, 0.2, 0.1, 0.05] + [0.0] * 10, pair=str(n)) for n in range(4)
    ]
    fits = sweep(found, drifts=(0.1, 0.2, 0.4), shares=(0.9, 1.0), quantiles=(0.5, 0.9))
    assert len(fits) == 12
    assert [f.mean_tokens for f in fits] == sorted(f.mean_tokens for f in fits)
    assert mean_tokens(fits[0].model, found) == fits[0].mean_tokens
    kept = distinct(fits, step=32, most=6)
    assert [f.mean_tokens for f in kept] == sorted({f.mean_tokens for f in fits})
    assert [f.mean_tokens for f in distinct(fits, step=1, most=2)] == [
        fits[0].mean_tokens,
        fits[-1].mean_tokens,
    ]
