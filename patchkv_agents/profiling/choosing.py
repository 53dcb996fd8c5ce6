"""Which of several policies is taken, by what they did on the same pairs.

Quality is the mean of log10(KL + 1e-5) over the pairs: a typical pair counts, and differences
below 1e-5 nats do not. Among the candidates within the budget of repaired rows, those that meet the
target go first, and what has a lower mean than all of them and no outliers: a median of few pairs
is noisy. Of these the best one is found, and the simplest, then cheapest of all that are as good:
not worse by more than what matters, or by one standard error (of the paired difference, by task) up
to twice that. Without the former, a candidate would be kept out for a tiny difference that it shows
on every pair; without the limit, a noisy one would be let in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from patchkv_agents.profiling.trials import Trial
from patchkv_agents.recovery import RecoveryPolicy

FLOOR = 1e-5
"""Nats that are added to each KL before its logarithm is taken."""

MATERIAL = 0.05
"""Difference of log10(KL + `FLOOR`) from which on it matters: 12 % of the KL."""

RULE = (
    "of those within the budget that meet the target (of all, if none does; one whose mean is "
    "lower than that of all of these is among them if its 95th percentile is), the simplest, then "
    "the one with the fewest rows, that is as good as the best: log10(KL + 1e-5) is higher by no "
    f"more than {MATERIAL}, or than one standard error of the paired difference, by task, if that "
    f"is at most {2 * MATERIAL}"
)

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Target:
    """What the calibration pairs have to show, in nats of first-token KL.

    Attributes:
        kl_median, kl_p95: largest median and 95th percentile.
    """

    kl_median: float = 0.005
    kl_p95: float = 0.1

    def met_by(self, figures: Mapping[str, Any]) -> bool:
        """Whether `figures_of` a policy are within it."""
        return bool(figures["kl_median"] <= self.kl_median and figures["kl_p95"] <= self.kl_p95)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy that may be taken.

    Attributes:
        label: for people.
        policy: what was tried.
        complexity: how many parts it has beyond the simplest.
    """

    label: str
    policy: RecoveryPolicy
    complexity: int = 0


def figures_of(trials: Sequence[Trial]) -> dict[str, Any]:
    """What one policy did on all pairs: quality, cost, and `n`."""
    kls = np.array([trial.first_token_kl for trial in trials])
    return {
        "kl_median": float(np.median(kls)),
        "kl_p95": float(np.quantile(kls, 0.95)),
        "kl_log_mean": float(10 ** np.log10(kls + FLOOR).mean() - FLOOR),
        "top1_agree": _mean(trials, "top1_agree"),
        "repair_ratio": _mean(trials, "repair_ratio"),
        "recompute_ratio": _mean(trials, "recompute_ratio"),
        "resume_ttft_ms": _mean(trials, "resume_ttft_ms"),
        "n": len(trials),
    }


def _mean(trials: Sequence[Trial], name: str) -> float:
    return math.fsum(float(getattr(trial, name)) for trial in trials) / len(trials)


def choose(
    candidates: Sequence[Candidate],
    trials: Sequence[Sequence[Trial]],
    tasks: Mapping[str, str],
    *,
    target: Target,
    budget: float,
) -> tuple[Candidate, list[dict[str, Any]]]:
    """The candidate to be taken, and what there was to choose from, as JSON.

    Args:
        candidates: at least one.
        trials: of each candidate, on the same pairs in the same order.
        tasks: of each pair, by its id.
        target: quality that is wanted.
        budget: largest mean share of the suffix that may be repaired. Where all candidates need
            more (the tail alone may, of short suffixes), the least that one needs.
    """
    figures = [figures_of(each) for each in trials]
    room = max(budget, min(each["repair_ratio"] for each in figures)) + 1e-9
    within = [n for n, each in enumerate(figures) if each["repair_ratio"] <= room]
    logs = [np.log10([trial.first_token_kl + FLOOR for trial in each]) for each in trials]
    means = [float(each.mean()) for each in logs]
    met = [n for n in within if target.met_by(figures[n])]
    bar = min((means[n] for n in met), default=-math.inf)
    better = [n for n in within if means[n] < bar and figures[n]["kl_p95"] <= target.kl_p95]
    allowed = sorted({*met, *better}) or within
    groups = [tasks[trial.pair] for trial in trials[0]]
    best = min(allowed, key=lambda n: (means[n], n))
    worse = [_difference(logs[n] - logs[best], groups) for n in range(len(candidates))]
    equal = [n for n in allowed if worse[n][0] <= max(min(worse[n][1], 2 * MATERIAL), MATERIAL)]
    chosen = min(
        equal,
        key=lambda n: (candidates[n].complexity, round(figures[n]["recompute_ratio"], 9), n),
    )
    table = [
        {
            "policy": candidate.label,
            "chosen": n == chosen,
            "best": n == best,
            "allowed": n in allowed,
            "worse_by": worse[n][0],
            "standard_error": worse[n][1],
            **figures[n],
        }
        for n, candidate in enumerate(candidates)
    ]
    return candidates[chosen], table


def _difference(differences: FloatArray, groups: Sequence[str]) -> tuple[float, float]:
    """Mean of paired differences and its standard error, by task; in powers of ten."""
    totals: dict[str, list[float]] = {}
    for difference, group in zip(differences.tolist(), groups, strict=True):
        totals.setdefault(group, []).append(difference)
    mean = float(differences.mean())
    # Sums of deviations by task: pairs of one task are not independent.
    deviations = np.array([sum(each) - mean * len(each) for each in totals.values()])
    count = len(totals)
    if count < 2:
        return mean, 0.0
    error = math.sqrt(count / (count - 1) * float((deviations**2).sum())) / len(differences)
    return mean, error
