"""The gate: whether a profile's policy is close enough to a full prefill to be used unasked.

The policy runs on pairs that it was not fitted to, and is compared with a full prefill of the new
context. Thresholds hold for all pairs together, whatever the kind of edit: what is measured here
is what the user of these contexts will meet. Figures by kind are given beside them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from patchkv_agents.errors import InputError, ProfileError
from patchkv_agents.estimates import Floats, bootstrap, bootstrap_mean
from patchkv_agents.profiling.checking import check_model, usable
from patchkv_agents.profiling.pairs import (
    ContextPair,
    PairSet,
    Skipped,
    context_digest,
    task_groups,
)
from patchkv_agents.profiling.trials import Trial, Trials
from patchkv_agents.progress import ProgressCallback, ignore_progress
from patchkv_agents.provenance import command_line, created, versions
from patchkv_agents.recovery.profile import (
    DataSource,
    Measure,
    Profile,
    Validation,
    setup_sha256,
)

if TYPE_CHECKING:
    from patchkv_agents.engine import Engine

ANSWER_TOKENS = 24
"""Length of the answers that are compared."""

_RESAMPLES = 1_000


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a policy has to reach.

    Attributes:
        first_token_kl_median, first_token_kl_p95: largest median and 95th percentile of
            KL(full prefill || policy) of the first token, in nats.
        top1_agree: least share of pairs whose likeliest first token is the full prefill's. Not 1:
            where two tokens are as likely as each other, any rounding decides.
        pairs, tasks: fewest that say enough.

    Raises:
        InputError: a value is out of its range.
    """

    first_token_kl_median: float = 0.005
    first_token_kl_p95: float = 0.1
    top1_agree: float = 0.9
    pairs: int = 12
    tasks: int = 6

    def __post_init__(self) -> None:
        for name in ("first_token_kl_median", "first_token_kl_p95"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}: use a number of 0 or more")
        if not 0.0 <= self.top1_agree <= 1.0:
            raise InputError(f"top1_agree is {self.top1_agree}: use 0 to 1")
        if min(self.pairs, self.tasks) < 1:
            raise InputError("a pass needs at least one pair of one task")


def calibration_marks(pairs: Iterable[ContextPair]) -> list[str]:
    """What pairs are known by later on, for `fit["calibration_tasks"]`: contexts and tasks."""
    return sorted({mark for pair in pairs for mark in marks_of(pair)})


def fitted_marks(profile: Profile) -> frozenset[str]:
    """The marks of the pairs to which a profile was fitted; see `marks_of`.

    Raises:
        ProfileError: the profile does not say what it was fitted to.
    """
    marks = profile.fit.get("calibration_tasks")
    if not isinstance(marks, list) or not all(isinstance(mark, str) for mark in marks):
        raise ProfileError(
            "the profile does not say what it was fitted to ('calibration_tasks'): profile again"
        )
    return frozenset(marks)


def marks_of(pair: ContextPair) -> frozenset[str]:
    """Digests of a pair's task (with the name of its data set) and of both contexts."""
    task = hashlib.blake2b(f"{pair.dataset}\x1f{pair.task}".encode(), digest_size=16).hexdigest()
    return frozenset((task, context_digest(pair.old), context_digest(pair.new)))


def unseen(profile: Profile, pairs: PairSet) -> PairSet:
    """The pairs to which a profile was not fitted; the others are among `skipped`.

    Left out is every pair of a task that was calibrated on, or of which a context was.

    Raises:
        InputError: it was fitted to all of them.
        ProfileError: the profile does not say what it was fitted to.
    """
    seen = fitted_marks(profile)
    kept = tuple(pair for pair in pairs.pairs if seen.isdisjoint(marks_of(pair)))
    if pairs.pairs and not kept:
        raise InputError(
            f"the profile was fitted to all {len(pairs.pairs)} pairs of {pairs.name}: give others"
        )
    reason = "the profile was fitted to its task"
    used = {pair.id for pair in kept}
    dropped = tuple(Skipped(pair.id, reason) for pair in pairs.pairs if pair.id not in used)
    return PairSet(pairs.name, kept, (*pairs.skipped, *dropped))


def validate(
    engine: Engine,
    profile: Profile,
    pairs: PairSet,
    *,
    thresholds: Thresholds | None = None,
    progress: ProgressCallback = ignore_progress,
) -> tuple[Validation, tuple[Skipped, ...]]:
    """Compare a profile's policy with full prefills.

    Measured are the pairs that it recovers approximately: those that it recomputes as a whole say
    nothing. Decided is by the figures themselves; intervals (bootstrap by task) show how sure they
    are.

    Args:
        engine: of the profile's model.
        profile: to be validated.
        pairs: that it was not fitted to (see `unseen`).
        thresholds: to be met; the defaults if left out.
        progress: called before each pair.

    Returns:
        The result, to be put into the profile; and the pairs that were not used.

    Raises:
        InputError: no pair can be used, or the policy is exact.
        PatchKVError: the model's logits are not numbers.
        ProfileError: the profile is another model's.
        UnsupportedModelError: the model recovers exactly, whatever the policy.
    """
    thresholds = thresholds or Thresholds()
    profile.check(engine.fingerprint, engine.model_name)
    check_model(engine)
    if profile.policy.is_exact:
        raise InputError("the profile's policy is exact: it can be used as it is")
    kept, skipped = usable(engine, pairs, answer_tokens=ANSWER_TOKENS)
    trials = Trials(engine, kept, answer_tokens=ANSWER_TOKENS)
    found = trials.run([profile.policy], storage=profile.storage, progress=progress)
    measured = [(p, t) for p, t in zip(kept, found, strict=True) if t.repair_ratio < 1.0]
    whole = [p for p, t in zip(kept, found, strict=True) if t.repair_ratio >= 1.0]
    if not measured:
        raise InputError(
            f"the policy recomputes all {len(kept)} pairs as a whole: give pairs of longer contexts"
        )
    used = PairSet(pairs.name, tuple(pair for pair, _ in measured))
    measures = _measures(measured)
    validation = Validation(
        reasons=tuple(_reasons(thresholds, measured, measures)),
        measures=measures,
        thresholds=asdict(thresholds),
        data=(DataSource(used.name, used.sha256, len(used.pairs), used.tasks),),
        setup_sha256=setup_sha256(profile.setup),
        fingerprint=engine.fingerprint,
        created=created(),
        command=command_line(),
        versions=versions(),
    )
    exact = tuple(Skipped(pair.id, "recomputed as a whole, so it is exact") for pair in whole)
    return validation, (*skipped, *exact)


_Figure = Callable[[Trial], Any]
_Measured = Sequence[tuple[ContextPair, Trial]]


def _measures(measured: _Measured) -> dict[str, Measure]:
    measures = {
        **_kl(measured, ""),
        "top1_agree": _mean(measured, lambda trial: trial.top1_agree),
        "exact_continuation": _mean(measured, lambda trial: trial.exact_continuation),
        "same_answer": _mean(measured, lambda trial: trial.same_answer),
        "repair_ratio": _mean(measured, lambda trial: trial.repair_ratio),
        "recompute_ratio": _mean(measured, lambda trial: trial.recompute_ratio),
    }
    with_stale = [(pair, trial) for pair, trial in measured if trial.stale is not None]
    if with_stale:
        measures["stale_answer_rate"] = _mean(with_stale, lambda trial: trial.stale)
        measures["full_prefill_stale_answer_rate"] = _mean(
            with_stale, lambda trial: trial.full_prefill_stale
        )
    kinds = dict.fromkeys(pair.kind for pair, _ in measured)
    for kind in kinds if len(kinds) > 1 else ():
        own = [(pair, trial) for pair, trial in measured if pair.kind == kind]
        measures |= _kl(own, f"/{kind}")
        measures[f"repair_ratio/{kind}"] = _mean(own, lambda trial: trial.repair_ratio)
    return measures


def _kl(measured: _Measured, suffix: str) -> dict[str, Measure]:
    return {
        f"first_token_kl_median{suffix}": _quantile(measured, 0.5),
        f"first_token_kl_p95{suffix}": _quantile(measured, 0.95),
    }


def _reasons(
    thresholds: Thresholds, measured: _Measured, measures: dict[str, Measure]
) -> Iterable[str]:
    """Why this is no pass."""
    tasks = len(set(_tasks(measured)))
    for count, least, what in (
        (len(measured), thresholds.pairs, "pairs"),
        (tasks, thresholds.tasks, "tasks"),
    ):
        if count < least:
            yield f"{count} {what} are too few: {least} are needed"
    for name, words in (
        ("first_token_kl_median", "median first-token KL"),
        ("first_token_kl_p95", "95th percentile of the first-token KL"),
    ):
        value, most = measures[name].value, getattr(thresholds, name)
        if not value <= most:
            yield f"the {words} is {value:.2g} nats, and at most {most:g} passes"
    agree = measures["top1_agree"].value
    if not agree >= thresholds.top1_agree:
        yield (
            f"{agree:.1%} of the likeliest first tokens are the full prefill's, and from "
            f"{thresholds.top1_agree:.1%} on it passes"
        )
    stale, expected = (
        sum(bool(getattr(trial, name)) for _, trial in measured)
        for name in ("stale", "full_prefill_stale")
    )
    if stale > expected:
        yield f"{stale} answers are out of date, and {expected} of the full prefill's"


def _mean(measured: _Measured, figure: _Figure) -> Measure:
    """The mean of a figure that every trial has, with its interval by task."""
    found = bootstrap_mean([float(figure(t)) for _, t in measured], groups=_tasks(measured))
    return Measure(found.estimate, found.low, found.high, found.n)


def _quantile(measured: _Measured, share: float) -> Measure:
    """A quantile of the first tokens' KL, with its interval by task."""

    def statistic(figures: Floats) -> float:
        return float(np.quantile(figures, share))

    kls = [trial.first_token_kl for _, trial in measured]
    found = bootstrap(kls, statistic, groups=_tasks(measured), resamples=_RESAMPLES)
    return Measure(found.estimate, found.low, found.high, found.n)


def _tasks(measured: _Measured) -> list[str]:
    """The task of each pair; those that share a context are one."""
    groups = task_groups(pair for pair, _ in measured)
    return [groups[pair.task] for pair, _ in measured]
