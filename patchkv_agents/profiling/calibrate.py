"""Calibration: from pairs of contexts to a profile.

The stages, each of which goes on where an interrupted run was:

1. drift behind the edits of all pairs, from two exact prefills each; and, from the same ones,
   windows of a fixed length with tails of several lengths, and what more rows would buy;
2. the dirty window: regressions for a sweep of settings, of which the shortest is taken that
   meets the quality target by itself, without attention or query tail;
3. the published rule for kappa, and which rows are recomputed beside window and tail;
4. the precision of stored rows, and what all of it does together.

Policies are tried on the calibration half of the tasks. Of the other half only the drift is
looked at, for the window's coverage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.engine import Engine
from patchkv_agents.errors import UnsupportedModelError
from patchkv_agents.estimates import bootstrap_mean
from patchkv_agents.profiling.candidates import (
    fixed_lengths,
    frontier,
    options,
    published_rules,
    window_and_tail,
)
from patchkv_agents.profiling.checking import (
    check_model,
    check_stretches,
    check_tasks,
    usable,
)
from patchkv_agents.profiling.choosing import (
    FLOOR,
    RULE,
    Candidate,
    Target,
    choose,
    figures_of,
)
from patchkv_agents.profiling.drift import drift_layers
from patchkv_agents.profiling.drift_log import DriftLog
from patchkv_agents.profiling.gate import calibration_marks
from patchkv_agents.profiling.kappa import KAPPAS, choose_kappa
from patchkv_agents.profiling.pairs import (
    ContextPair,
    PairSet,
    Skipped,
    joined,
    split,
    task_groups,
)
from patchkv_agents.profiling.precision import fit_precision
from patchkv_agents.profiling.states import LOSSLESS
from patchkv_agents.profiling.trials import Trial, Trials
from patchkv_agents.profiling.windows import (
    Observation,
    WindowFit,
    coverage,
    distinct,
    sweep,
)
from patchkv_agents.progress import Progress, ProgressCallback, ignore_progress
from patchkv_agents.provenance import command_line, created, versions
from patchkv_agents.recovery import RecoveryPolicy
from patchkv_agents.recovery.profile import DataSource, Profile


@dataclass(frozen=True, slots=True)
class CalibrationConfig:
    """What is tried. Part of the profile.

    Attributes:
        most_repaired: share of the suffix that the chosen policy may recompute.
        kl_median, kl_p95: the quality target; see `Target`.
        precision: whether thresholds of precision are fitted; otherwise they are the defaults.
        block_size: unit of repair, in tokens.
        drift_block: unit of drift, and of repair by the published rules, in tokens.
        drifts, shares, quantiles: tau_V, gamma and quantile of the window's sweep.
        fits: most regressions that are tried.
        kappas: shares of attention rows that the published rule chooses from.
        windows_and_tails: fixed lengths that are tried, in tokens.
    """

    most_repaired: float = 0.10
    kl_median: float = 0.005
    kl_p95: float = 0.1
    precision: bool = True
    block_size: int = 1
    drift_block: int = 32
    drifts: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.3)
    shares: tuple[float, ...] = (0.8, 0.9, 0.95)
    quantiles: tuple[float, ...] = (0.5, 0.75, 0.9)
    fits: int = 5
    kappas: tuple[float, ...] = KAPPAS
    windows_and_tails: tuple[tuple[int, int], ...] = (
        (0, 64), (16, 64), (32, 1), (32, 32), (32, 64), (32, 96), (64, 1), (64, 32), (64, 64),
        (64, 96), (96, 32), (96, 64), (128, 1), (128, 32), (256, 32),
    )  # fmt: skip

    @property
    def target(self) -> Target:
        """The quality target."""
        return Target(self.kl_median, self.kl_p95)


def calibrate(
    engine: Engine,
    sources: Sequence[PairSet],
    work: Path,
    *,
    config: CalibrationConfig | None = None,
    progress: ProgressCallback = ignore_progress,
) -> tuple[Profile, tuple[Skipped, ...]]:
    """Fit a profile to pairs. It is not validated.

    Args:
        engine: of the model.
        sources: of pairs; half of their tasks are used for calibration.
        work: folder of the logs from which the same call goes on. Deleting it starts anew.
        config: what is tried.
        progress: called at the beginning of each step.

    Returns:
        The profile, and the pairs that could not be used.

    Raises:
        InputError: too few pairs, or the folder is of another run.
        PatchKVError: the model's rows or logits are not numbers.
        UnsupportedModelError: the model recovers exactly, whatever the policy.
    """
    config = config or CalibrationConfig()
    check_model(engine)
    pairs = joined(sources)
    kept, skipped = usable(engine, pairs)
    used = {pair.id for pair in kept}
    # Split before anything is left out: the halves are those of the same data on any model.
    calibration, validation = (
        tuple(pair for pair in half if pair.id in used) for half in split(pairs.pairs)
    )
    check_tasks(kept)
    for half in (calibration, validation):
        check_tasks(half, least=2)
    check_stretches(engine, calibration)
    run = _Calibration(engine, calibration, validation, work, config, progress)
    profile = run.profile()
    fit: dict[str, Any] = {
        "pairs": {
            "calibration": len(calibration),
            "validation": len(validation),
            "calibration_tasks": len(set(task_groups(calibration).values())),
            "left_out": len(skipped),
        },
        "config": asdict(config),
        **run.fit,
        "calibration_tasks": calibration_marks(calibration),
    }
    fit = json.loads(json.dumps(fit))  # with lists for tuples, as it comes back from the file
    data = tuple(
        DataSource(each.name, each.sha256, len(each.pairs), each.tasks) for each in sources
    )
    return replace(profile, fit=fit, data=data), skipped


class _Calibration:
    """One call of `calibrate`.

    Attributes:
        fit: what was found so far, as JSON.
    """

    def __init__(
        self,
        engine: Engine,
        calibration: Sequence[ContextPair],
        validation: Sequence[ContextPair],
        work: Path,
        config: CalibrationConfig,
        progress: ProgressCallback,
    ) -> None:
        self._engine, self._work, self._config, self._progress = engine, work, config, progress
        self._calibration, self._validation = calibration, validation
        groups = task_groups(calibration)
        self._tasks = {pair.id: groups[pair.task] for pair in calibration}
        self._trials = Trials(engine, calibration, work / "trials.jsonl")
        self._drift = DriftLog(engine, config.drift_block, work / "drift.jsonl")
        self.fit: dict[str, Any] = {}

    def profile(self) -> Profile:
        """Run the stages."""
        found = self._observed()
        window = self._window(found)
        base = self._lengths()
        published, policy = self._selection(window, base)
        self._frontier()
        storage = self._storage()
        self._result({"patchkv": policy, "patchkv_published": published}, storage)
        return Profile(
            model=self._engine.model_name,
            fingerprint=self._engine.fingerprint,
            policy=replace(policy, name="patchkv"),
            published=replace(published, name="patchkv_published"),
            storage=storage,
            data=(),
            fit={},
            versions=versions(),
            created=created(),
            command=command_line(),
        )

    def _observed(self) -> dict[str, list[Observation]]:
        """Drift of the pairs of both halves, by pair. Lengths are tried beside."""
        lengths = [*self._fixed(), *frontier(self._config.block_size)]
        halves: tuple[tuple[Trials, list[RecoveryPolicy], str], ...] = (
            (self._trials, [each.policy for each in lengths], "drift, windows and tails"),
            (Trials(self._engine, self._validation), [], "drift of validation pairs"),
        )
        for trials, policies, stage in halves:
            trials.run(
                policies,
                observe=self._drift.observe,
                unobserved=lambda pair: not self._drift.has(pair),
                progress=self._progress_of(stage),
            )
        pairs = (*self._calibration, *self._validation)
        self.fit["drift"] = {
            "of": "values, relative L2 distance to a full prefill, median over a block's rows and "
            "the sampled layers",
            "layers": list(drift_layers(self._engine)),
            "block_size": self._config.drift_block,
        }
        return {pair.id: self._drift.of(pair) for pair in pairs}

    def _window(self, found: Mapping[str, Sequence[Observation]]) -> WindowFit:
        """The regression with the shortest windows that meets the target."""
        own = [each for pair in self._calibration for each in found[pair.id]]
        config = self._config
        fits = sweep(own, drifts=config.drifts, shares=config.shares, quantiles=config.quantiles)
        tried = distinct(fits, step=config.drift_block / 2, most=config.fits)
        policies = [
            window_and_tail(0, 1, config.drift_block, window_model=fit.model) for fit in tried
        ]
        self._run(policies, "predicted windows")
        figures = [figures_of(self._trials.of(policy)) for policy in policies]
        met = [n for n, each in enumerate(figures) if config.target.met_by(each)]
        chosen = (
            met[0] if met else min(range(len(tried)), key=lambda n: (figures[n]["kl_log_mean"], n))
        )
        others = [each for pair in self._validation for each in found[pair.id]]
        self.fit["window"] = {
            "rule": "the shortest mean window that meets the target by itself (no attention, the "
            "last token as its tail); without one, the best",
            "met": bool(met),
            "target": asdict(config.target),
            "observations": len(own),
            "chosen": asdict(tried[chosen]),
            "coverage": coverage(tried[chosen], others),
            "tried": [
                {**_setting(fit), **each, "model": asdict(fit.model)}
                for fit, each in zip(tried, figures, strict=True)
            ],
            "sweep": [_setting(fit) for fit in fits],
        }
        return tried[chosen]

    def _lengths(self) -> RecoveryPolicy:
        """The best fixed window and tail."""
        chosen, table = self._choose(self._fixed())
        self.fit["lengths"] = {"rule": RULE, "chosen": chosen.label, "tried": table}
        return chosen.policy

    def _fixed(self) -> list[Candidate]:
        config = self._config
        return fixed_lengths(config.windows_and_tails, config.block_size, config.most_repaired)

    def _selection(
        self, window: WindowFit, base: RecoveryPolicy
    ) -> tuple[RecoveryPolicy, RecoveryPolicy]:
        """The published policy with its kappa, and ours with its further rows."""
        published = published_rules(window, self._config.kappas, self._config.drift_block)
        added = options(base, window)
        self._run(
            [*published.values(), *(each.policy for each in added)], "attention and selection"
        )
        kappa = self._kappa(published)
        chosen, table = self._choose(added)
        self.fit["selection"] = {"rule": RULE, "chosen": chosen.label, "tried": table}
        return published[kappa], chosen.policy

    def _frontier(self) -> None:
        """What more rows than the limit allows would buy."""
        tried = frontier(self._config.block_size)
        self.fit["frontier"] = {
            "of": "the mean of log10(KL + 1e-5), as a KL, with a 95 % interval by task",
            "tried": [
                {
                    "policy": each.label,
                    **figures_of(self._trials.of(each.policy)),
                    **self._interval(self._trials.of(each.policy)),
                    **self._by_kind(self._trials.of(each.policy)),
                }
                for each in tried
            ],
        }

    def _interval(self, trials: Sequence[Trial]) -> dict[str, float]:
        """The 95 % interval of the log-mean of KL, in nats; by task."""
        found = bootstrap_mean(
            [math.log10(trial.first_token_kl + FLOOR) for trial in trials],
            groups=[self._tasks[trial.pair] for trial in trials],
        )
        return {"low": 10**found.low - FLOOR, "high": 10**found.high - FLOOR}

    def _by_kind(self, trials: Sequence[Trial]) -> dict[str, float]:
        """The log-mean of KL for each kind of edit, in nats."""
        kinds = {pair.id: pair.kind for pair in self._calibration}
        return {
            f"kl_{kind}": figures_of([each for each in trials if kinds[each.pair] == kind])[
                "kl_log_mean"
            ]
            for kind in dict.fromkeys(kinds.values())
        }

    def _kappa(self, policies: Mapping[float, RecoveryPolicy]) -> float:
        """The published rule, data set by data set."""
        datasets = {pair.id: pair.dataset for pair in self._calibration}
        quality: dict[str, dict[float, float]] = {}
        cost, times = {}, {}
        for kappa, policy in policies.items():
            trials = self._trials.of(policy)
            for dataset in sorted(set(datasets.values())):
                own = [trial.first_token_kl for trial in trials if datasets[trial.pair] == dataset]
                quality.setdefault(dataset, {})[kappa] = -100 * sum(own) / len(own)
            figures = figures_of(trials)
            cost[kappa], times[kappa] = figures["recompute_ratio"], figures["resume_ttft_ms"]
        choice = choose_kappa(quality, cost)
        self.fit["kappa"] = {
            "rule": "of the settings within 0.25 points of the best on every data set, the "
            "cheapest; without one, the least worst gap, then the cheapest",
            "points": "-100 x mean first-token KL in nats: F1 is too coarse for so few pairs",
            "cost": "mean recompute ratio, which resume TTFT follows; times are of single runs",
            "chosen": choice.kappa,
            "qualified": list(choice.qualified),
            "tried": [
                {
                    "kappa": kappa,
                    "worst_gap": choice.worst_gap[kappa],
                    "recompute_ratio": cost[kappa],
                    "resume_ttft_ms": times[kappa],
                    "points": {dataset: each[kappa] for dataset, each in quality.items()},
                }
                for kappa in policies
            ],
        }
        return choice.kappa

    def _storage(self) -> PrecisionPolicy:
        """The thresholds of precision."""
        if not self._config.precision:
            self.fit["precision"] = {"note": "not fitted: these are the defaults"}
            return PrecisionPolicy()
        try:
            precision, record = fit_precision(
                self._engine,
                self._calibration,
                log=self._work / "precision.jsonl",
                progress=self._progress,
            )
        except UnsupportedModelError as error:
            self.fit["precision"] = {"note": str(error)}
            return PrecisionPolicy()
        self.fit["precision"] = record
        return precision

    def _result(self, chosen: Mapping[str, RecoveryPolicy], storage: PrecisionPolicy) -> None:
        """What the chosen policies do on the calibration pairs, with rows as they are stored."""
        self._trials.run(
            list(chosen.values()), storage=storage, progress=self._progress_of("result")
        )
        self.fit["result"] = {
            "on": "the pairs that were fitted to, so that it flatters: see the validation",
            "policies": [
                {"policy": name, "stored": stored_as, **figures_of(self._trials.of(policy, form))}
                for stored_as, form in (("losslessly", LOSSLESS), ("with loss", storage))
                for name, policy in chosen.items()
            ],
        }

    def _choose(self, candidates: Sequence[Candidate]) -> tuple[Candidate, list[dict[str, Any]]]:
        trials: list[list[Trial]] = [self._trials.of(each.policy) for each in candidates]
        chosen, table = choose(
            candidates,
            trials,
            self._tasks,
            target=self._config.target,
            budget=self._config.most_repaired,
        )
        return chosen, [
            {**row, **self._by_kind(own)} for row, own in zip(table, trials, strict=True)
        ]

    def _run(self, policies: Sequence[RecoveryPolicy], stage: str) -> None:
        self._trials.run(policies, progress=self._progress_of(stage))

    def _progress_of(self, stage: str) -> ProgressCallback:
        """Reports the trials of a stage under its name."""

        def report(progress: Progress) -> None:
            self._progress(replace(progress, doing=f"{stage}: {progress.doing}"))

        return report


def _setting(fit: WindowFit) -> dict[str, Any]:
    """What a fit was made with, and how long its windows are, as JSON."""
    names = ("drift", "share", "quantile", "mean_tokens")
    return {name: getattr(fit, name) for name in names}
