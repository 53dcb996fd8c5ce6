"""Choosing among policies: budget, target, best, ties; case by case."""

from __future__ import annotations

import dataclasses

import pytest

from patchkv_agents.profiling.choosing import Candidate, Target, choose, figures_of
from patchkv_agents.profiling.trials import Trial
from patchkv_agents.recovery import RecoveryPolicy

POLICY = RecoveryPolicy.default()
NOTHING = {field.name: 0 for field in dataclasses.fields(Trial)}


def trials(kls: list[float], *, repaired: float = 0.1) -> list[Trial]:
    return [
        dataclasses.replace(
            Trial(**{**NOTHING, "pair": str(n)}),
            first_token_kl=kl,
            repair_ratio=repaired,
            recompute_ratio=repaired,
        )
        for n, kl in enumerate(kls)
    ]


def chosen(
    tried: dict[str, list[Trial]], *, complexity: dict[str, int] | None = None, budget: float = 0.1
) -> str:
    candidates = [Candidate(n, POLICY, (complexity or {}).get(n, 0)) for n in tried]
    tasks = {str(n): str(n) for n in range(20)}
    found, table = choose(
        candidates, list(tried.values()), tasks, target=Target(0.005, 0.1), budget=budget
    )
    assert [line["policy"] for line in table if line["chosen"]] == [found.label]
    return found.label


def test_the_clearly_best_within_the_budget_is_taken():
    assert (
        chosen(
            {
                "poor": trials([1e-3] * 6),
                "good": trials([1e-4, 2e-4, 1e-4, 3e-4, 1e-4, 2e-4]),
                "dear": trials([1e-6] * 6, repaired=0.2),
            }
        )
        == "good"
    )


def test_what_is_not_surely_worse_and_has_fewer_rows_is_preferred():
    """One pair differs, in favour of the longer window: noise."""
    tried = {
        "long": trials([1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 4e-4], repaired=0.1),
        "short": trials([1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 5e-4], repaired=0.05),
    }
    assert chosen(tried) == "short"


def test_simple_goes_before_cheap_among_equals():
    tried = {
        "odd": trials([1e-3, 2e-3, 1e-3], repaired=0.01),
        "plain": trials([2e-3, 1e-3, 1e-3], repaired=0.1),
    }
    assert chosen(tried, complexity={"odd": 1}) == "plain"
    assert chosen(tried) == "odd"


def test_a_policy_with_outliers_is_taken_only_if_none_meets_the_target():
    tried = {
        "usually": trials([1e-5] * 9 + [3.0]),
        "always": trials([1e-3] * 10),
    }
    assert chosen(tried) == "always"
    assert chosen({"usually": tried["usually"], "never": trials([0.02] * 10)}) == "usually"


def test_a_noisy_candidate_that_is_far_worse_is_not_as_good():
    """One standard error alone would let it in, and it has fewer rows."""
    tried = {
        "sure": trials([1e-3] * 5),
        "noisy": trials([1e-3 * 10**each for each in (-0.9, -0.9, -0.9, 1.9, 1.9)], repaired=0.05),
    }
    assert chosen(tried) == "sure"


def test_a_median_just_above_the_target_does_not_keep_the_best_out():
    tried = {
        "met": trials([4e-3, 4.9e-3, 9e-2, 4.9e-3, 4.9e-3]),
        "better": trials([1e-4, 5.1e-3, 6e-3, 5.1e-3, 1e-4]),
        "outlier": trials([1e-5, 1e-5, 0.3, 6e-3, 6e-3]),
    }
    assert chosen(tried) == "better"


def test_rows_that_run_twice_count():
    once, twice = trials([1e-3] * 5), trials([1e-3] * 5, repaired=0.05)
    twice = [dataclasses.replace(each, recompute_ratio=0.5) for each in twice]
    assert chosen({"twice": twice, "once": once}) == "once"


def test_where_the_tail_alone_passes_the_budget_the_least_is_allowed():
    tried = {
        "less": trials([1e-3] * 5, repaired=0.15),
        "more": trials([1e-4] * 5, repaired=0.3),
    }
    assert chosen(tried) == "less"


def test_pairs_of_one_task_count_as_one_for_the_error():
    """Ten copies of one difference are one observation: its sign says nothing."""
    first, second = trials([1e-3] * 11), trials([1e-3] + [2e-3] * 10, repaired=0.05)
    candidates = [Candidate("first", POLICY), Candidate("second", POLICY)]
    one_task = {str(n): "a" if n else "b" for n in range(11)}
    many = {str(n): str(n) for n in range(11)}
    outcomes = [
        choose(candidates, [first, second], tasks, target=Target(), budget=0.1)[1][1]
        for tasks in (one_task, many)
    ]
    assert outcomes[0]["standard_error"] > 1.5 * outcomes[1]["standard_error"]
    assert outcomes[0]["worse_by"] == outcomes[1]["worse_by"] > 0


def test_figures_are_those_of_the_pairs():
    figures = figures_of(trials([0.0, 1e-3, 2e-3, 3e-3]))
    assert figures["kl_median"] == pytest.approx(1.5e-3) and figures["n"] == 4
    assert figures["kl_p95"] == pytest.approx(2.85e-3)
    geometric = (1e-5 * 1.01e-3 * 2.01e-3 * 3.01e-3) ** 0.25 - 1e-5
    assert figures["kl_log_mean"] == pytest.approx(geometric)
