"""Methods compared over several runs of one model, example by example, and the targets.

Figures of one episode are only compared within one run, and rows are drawn together, whatever the
edits made of them. An episode that several runs have counts once, as the first of them has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from patchkv_agents.estimates import Interval, bootstrap_mean, paired_difference, paired_ratio
from patchkv_evals.errors import DataError
from patchkv_evals.running.results import Record, Run
from patchkv_evals.running.spec import FULL_PREFILL

SPEEDUP_TARGETS = {"prefix_cache": 4.0, "cacheblend": 1.5}
"""How many times faster than these, medians of resume TTFT."""
MIN_F1_DIFFERENCE, MIN_F1_BOUND = -1.0, -3.0
"""In points, against the full prefill: the mean, and the lower end of its interval."""
MIN_SAME_ANSWER = 0.95


@dataclass(frozen=True, slots=True)
class MethodFigures:
    """One method over all runs of a model.

    Attributes:
        method: its name.
        n: episodes (steps of chains) with a result.
        speedups: by other method, how many times faster this one resumes: ratio of the medians.
        f1_difference: mean F1 minus that of the full prefill, in points of 100.
        same_answer: share of answers equal to the full prefill's.
        stale_answers, stale_answers_full_prefill: how many give the answer from before the edit,
            of the `stale_n` episodes in which one went stale.
        first_token_kl: mean, in nats.
    """

    method: str
    n: int
    speedups: Mapping[str, Interval]
    f1_difference: Interval | None
    same_answer: Interval | None
    stale_answers: int
    stale_answers_full_prefill: int
    stale_n: int
    first_token_kl: Interval | None


@dataclass(frozen=True, slots=True)
class Target:
    """One thing that a method shall reach; `met` is None where nothing is known."""

    name: str
    wanted: str
    value: str
    met: bool | None


@dataclass(frozen=True, slots=True)
class Pooled:
    """All runs of one model with methods from one profile, or from none.

    Attributes:
        model, fingerprint: which.
        runs: the runs.
        episodes, rows: how many of each have any result.
        methods: figures by method, the full prefill left out.
    """

    model: str
    fingerprint: str
    runs: tuple[Run, ...]
    episodes: int
    rows: int
    methods: Mapping[str, MethodFigures]

    def targets(self, method: str = "patchkv") -> tuple[Target, ...]:
        """What a method should reach, and whether it does.

        Raises:
            DataError: no run has this method.
        """
        if method not in self.methods:
            raise DataError(f"No run of {self.model} has {method}; there are {[*self.methods]}.")
        figures = self.methods[method]
        return (
            *(
                _speedup_target(other, least, figures.speedups.get(other))
                for other, least in SPEEDUP_TARGETS.items()
                if other != method
            ),
            *_quality_targets(figures),
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "folders": [str(run.folder) for run in self.runs],
            "episodes": self.episodes,
            "rows": self.rows,
            "failures": sum(len(run.failures) for run in self.runs),
            "methods": {name: asdict(figures) for name, figures in self.methods.items()},
            "targets": {
                name: [asdict(target) for target in self.targets(name)]
                for name in self.methods
                if name == "patchkv"
            },
        }


def pool(runs: Iterable[Run]) -> tuple[Pooled, ...]:
    """Compare the methods of some runs, model by model; those from different profiles never mix."""
    groups: dict[tuple[str, str | None], list[Run]] = {}
    for run in runs:
        key = run.config["fingerprint"], run.config.get("profile_sha256")
        groups.setdefault(key, []).append(run)
    return tuple(_pooled(tuple(own)) for own in groups.values())


def _pooled(runs: tuple[Run, ...]) -> Pooled:
    records = [record for run in runs for record in run.records]
    names = dict.fromkeys(record["method"] for record in records)
    return Pooled(
        model=runs[0].config["model"],
        fingerprint=runs[0].config["fingerprint"],
        runs=runs,
        episodes=len({_key(run, record) for run in runs for record in run.records}),
        rows=len({_row(record) for record in records}),
        methods={name: _figures(runs, name) for name in names if name != FULL_PREFILL},
    )


def _figures(runs: Sequence[Run], method: str) -> MethodFigures:
    pairs = list(_pairs(runs, method, FULL_PREFILL))
    stale = _values(pairs, "stale_answer")
    speedups = {}
    for other in SPEEDUP_TARGETS:
        if other != method:
            times = _values(list(_pairs(runs, method, other)), "resume_ttft_ms")
            if times.n:
                speedups[other] = paired_ratio(times.own, times.others, groups=times.groups)
    f1 = _values(pairs, "f1", factor=100.0)
    same, kl = _values(pairs, "same_answer"), _values(pairs, "first_token_kl")
    return MethodFigures(
        method=method,
        n=len(pairs),
        speedups=speedups,
        f1_difference=paired_difference(f1.own, f1.others, groups=f1.groups) if f1.n else None,
        same_answer=bootstrap_mean(same.own, groups=same.groups) if same.n else None,
        stale_answers=int(sum(stale.own)),
        stale_answers_full_prefill=int(sum(stale.others)),
        stale_n=stale.n,
        first_token_kl=bootstrap_mean(kl.own, groups=kl.groups) if kl.n else None,
    )


@dataclass(frozen=True, slots=True)
class _Values:
    """One metric of two methods on the same episodes, and the row of each."""

    own: list[float]
    others: list[float]
    groups: list[tuple[str, str]]

    @property
    def n(self) -> int:
        return len(self.own)


def _values(pairs: Sequence[tuple[Record, Record]], metric: str, factor: float = 1.0) -> _Values:
    known = [
        (record, other)
        for record, other in pairs
        if record["metrics"][metric] is not None and other["metrics"][metric] is not None
    ]
    return _Values(
        [factor * float(record["metrics"][metric]) for record, _ in known],
        [factor * float(other["metrics"][metric]) for _, other in known],
        [_row(record) for record, _ in known],
    )


def _pairs(runs: Iterable[Run], method: str, other: str) -> Iterator[tuple[Record, Record]]:
    """The records of both methods on each episode that one run has of both."""
    seen: set[_Key] = set()
    for run in runs:
        found = {
            name: {_key(run, record): record for record in run.records if record["method"] == name}
            for name in (method, other)
        }
        for key, record in found[method].items():
            if key in found[other] and key not in seen:
                seen.add(key)
                yield record, found[other][key]


_Key = tuple[str, int, int, float]
"""Episode, step, length, position: what makes a figure another one."""


def _key(run: Run, record: Record) -> _Key:
    return record["episode"], record["step"], run.config["tokens"], run.config["position"]


def _row(record: Record) -> tuple[str, str]:
    return record["dataset"], record["row"]


def _speedup_target(other: str, least: float, found: Interval | None) -> Target:
    name = f"resume TTFT against {other}"
    wanted = f"at least {least:g} times faster (medians)"
    if found is None:
        return Target(name, wanted, "not measured", None)
    value = f"{found.estimate:.2f} times [{found.low:.2f}, {found.high:.2f}], n = {found.n}"
    return Target(name, wanted, value, found.estimate >= least)


def _quality_targets(figures: MethodFigures) -> Iterator[Target]:
    f1, same = figures.f1_difference, figures.same_answer
    f1_wanted = f"mean at least {MIN_F1_DIFFERENCE:g}, lower 95 % bound at least {MIN_F1_BOUND:g}"
    same_wanted = f"at least {MIN_SAME_ANSWER:g}"
    if f1 is None or same is None:
        yield Target("F1 against full prefill, points", f1_wanted, "not measured", None)
        yield Target("same answer as full prefill", same_wanted, "not measured", None)
    else:
        yield Target(
            "F1 against full prefill, points",
            f1_wanted,
            f"{f1.estimate:+.2f} [{f1.low:+.2f}, {f1.high:+.2f}], n = {f1.n}",
            f1.estimate >= MIN_F1_DIFFERENCE and f1.low >= MIN_F1_BOUND,
        )
        yield Target(
            "same answer as full prefill",
            same_wanted,
            f"{same.estimate:.3f} [{same.low:.3f}, {same.high:.3f}], n = {same.n}",
            same.estimate >= MIN_SAME_ANSWER,
        )
    stale, full = figures.stale_answers, figures.stale_answers_full_prefill
    yield Target(
        "stale answers",
        "no more than full prefill",
        f"{stale} against {full}, n = {figures.stale_n}" if figures.stale_n else "not measured",
        stale <= full if figures.stale_n else None,
    )
