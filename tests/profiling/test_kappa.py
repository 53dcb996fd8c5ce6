"""The published rule for kappa, case by case."""

from __future__ import annotations

import pytest

from patchkv_agents.errors import InputError
from patchkv_agents.profiling.kappa import choose_kappa

COST = {0.0: 1.0, 0.01: 2.0, 0.05: 3.0}


def test_the_cheapest_within_a_quarter_point_on_every_data_set_is_taken():
    quality = {
        "a": {0.0: 50.0, 0.01: 50.8, 0.05: 51.0},
        "b": {0.0: 40.0, 0.01: 39.75, 0.05: 40.0},
    }
    choice = choose_kappa(quality, COST)
    assert choice.qualified == (0.01, 0.05)
    assert choice.kappa == 0.01
    assert choice.worst_gap[0.0] == pytest.approx(1.0)


def test_without_a_qualified_one_the_worst_gap_decides_before_the_cost():
    quality = {
        "a": {0.0: 60.0, 0.01: 58.0, 0.05: 59.0},
        "b": {0.0: 40.0, 0.01: 43.0, 0.05: 42.0},
    }
    choice = choose_kappa(quality, COST)
    assert choice.qualified == ()
    assert choice.kappa == 0.05  # its worst gap is 1, theirs are 3 and 2


def test_equal_gaps_go_by_cost_and_equal_costs_to_the_smaller_share():
    quality = {"a": {0.0: 50.0, 0.01: 52.0, 0.05: 51.0}, "b": {0.0: 52.0, 0.01: 50.0, 0.05: 50.0}}
    assert choose_kappa(quality, COST).kappa == 0.0
    same = {"a": dict.fromkeys(COST, 1.0)}
    assert choose_kappa(same, dict.fromkeys(COST, 1.0)).kappa == 0.0


def test_a_missing_setting_is_an_error():
    with pytest.raises(InputError, match="every setting"):
        choose_kappa({"a": {0.0: 1.0}}, COST)
    with pytest.raises(InputError, match="every setting"):
        choose_kappa({}, COST)
