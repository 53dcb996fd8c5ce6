"""Resume TTFT against context length, edit position, edit size and the policy's settings.

One of these is swept at a time. Contexts are the demo's episode (one tool result at a fifth of the
context replaced), or, where the edit's position or size is chosen, the demo's text with a span of
that place and size. Every method resumes from the state it would have: stored at its own
precision. TTFT runs from the start of recovery, after planning, to the first token's id.

A point is one method at one value: `sweep`, `value` (null for a method that the sweep does not
vary), `method`, `tokens`, `tokens_old`, `position` (share), `edit_tokens` (of the new context),
`ttft_ms`, `planning_ms`, `restore_ms`, `recompute_ms` (medians), `ttft_rounds_ms`, `speedup` (over
prefix cache, of medians), `recompute_ratio`, `repair_ratio`, `payload_bytes`, `payload_ratio` (to
the same rows in 16 bits; null if none were read), `first_token_kl` (nats, full prefill || method),
`top1_agree`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal, get_args

import torch

from patchkv_agents.backends.transformers.adapter import ModelAdapter
from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.divergence import first_token_kl
from patchkv_agents.engine import Engine
from patchkv_agents.engine.resumed import Resumed
from patchkv_agents.engine.sequence import KVSequence
from patchkv_agents.engine.stopwatch import Stopwatch
from patchkv_agents.errors import InputError
from patchkv_agents.ranges import IntArray
from patchkv_agents.recovery import Blocks, RecoveryPolicy, RecoverySetup
from patchkv_agents.recovery.named import method
from patchkv_evals.benchmarks.contexts import EditedContext, demo_context, spliced_context
from patchkv_evals.benchmarks.results import BenchResult, Column, number, spread
from patchkv_evals.benchmarks.timing import Point, Report, Steps, interleaved, silent, timing
from patchkv_evals.running.measures import payload_ratio

Sweep = Literal["length", "position", "edit_size", "attention", "block", "precision"]
SWEEPS: tuple[Sweep, ...] = get_args(Sweep)
_OF_THE_CONTEXT = {"length": "tokens", "position": "position", "edit_size": "edit_tokens"}
"""Sweeps that vary the context, and the field of the configuration that each of them sets."""
BASELINES = ("direct_reuse", "cacheblend")
PRECISIONS = {
    "fp16": "patchkv_fp16",
    "int8": "patchkv_int8",
    "int4": "patchkv_int4",
    "mixed": "patchkv",
}
"""Names of the values of the sweep `precision`, and the methods that run them."""
DEFAULT_VALUES: dict[Sweep, tuple[Any, ...]] = {
    "length": (1000, 2000, 4000, 8000),
    "position": (0.1, 0.3, 0.5, 0.7, 0.9),
    "edit_size": (16, 64, 256, 1024),
    "attention": (0.0, 0.005, 0.01, 0.015, 0.03, 0.05),
    "block": (16, 32, 64, 128),
    "precision": tuple(PRECISIONS),
}
DEFAULT_TOKENS = 4000
DEFAULT_POSITION = 0.2
DEFAULT_EDIT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ResumeConfig:
    """What is swept, and where the rest stands.

    Attributes:
        sweep: what varies.
        values: of what varies; the sweep's own if left out.
        tokens: length of the context, unless swept.
        position, edit_tokens: of the edit, unless swept; with neither given nor swept, the edit is
            the demo's own.
        baselines: the methods beside `patchkv` and `prefix_cache`, which always run.
        rounds: that count.
        model: name of the engine's model, for the record.

    Raises:
        InputError: a sweep, value or method does not exist.
    """

    sweep: Sweep = "length"
    values: tuple[Any, ...] = ()
    tokens: int = DEFAULT_TOKENS
    position: float | None = None
    edit_tokens: int | None = None
    baselines: tuple[str, ...] = BASELINES
    rounds: int = 3
    model: str = "smollm2"

    def __post_init__(self) -> None:
        if self.sweep not in SWEEPS:
            raise InputError(f"there is no sweep '{self.sweep}': use one of {', '.join(SWEEPS)}")
        if not self.values:
            object.__setattr__(self, "values", DEFAULT_VALUES[self.sweep])
        for name in self.baselines:
            method(name)
        if self.sweep == "precision":
            for value in self.values:
                if value not in PRECISIONS:
                    known = ", ".join(PRECISIONS)
                    raise InputError(f"there is no precision '{value}': use some of {known}")


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """One context, and what runs on it: (value, name, method)."""

    context: EditedContext
    runs: tuple[tuple[Any, str, RecoverySetup], ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """One resume."""

    resumed: Resumed
    times: dict[str, float]


def resume(engine: Engine, config: ResumeConfig, report: Report = silent) -> BenchResult:
    """Measure a sweep.

    Raises:
        InputError: a context does not fit the model, or cannot be made.
    """
    cases = _cases(engine, config)
    for case in cases:
        engine.check_length(len(case.context.new))
    steps = Steps(sum(len(case.context.new) ** 1.3 for case in cases), report)
    points: list[Point] = []
    for index, case in enumerate(cases):
        tokens = len(case.context.new)
        value = "" if len(cases) == 1 else f", {config.sweep} {case.runs[-1][0]}"
        steps.next(f"{tokens:,} tokens{value}", tokens**1.3)
        points += _measure(engine, config, case, warm_up=index == 0)
    return BenchResult(
        "resume",
        asdict(config),
        points,
        str(engine.adapter.device),
        variant=config.sweep,
    )


def _cases(engine: Engine, config: ResumeConfig) -> list[_Case]:
    ours = method("patchkv")
    reference = dict.fromkeys(("prefix_cache", *config.baselines))
    fixed = tuple((None, name, method(name)) for name in reference)
    if config.sweep not in _OF_THE_CONTEXT:
        varied = tuple((value, "patchkv", _varied(ours, config, value)) for value in config.values)
        return [_Case(_context(engine, config), (*fixed, *varied))]
    cases = []
    for value in config.values:
        own = replace(config, **{_OF_THE_CONTEXT[config.sweep]: value})
        runs = tuple((value, name, setup) for _, name, setup in fixed)
        cases.append(_Case(_context(engine, own), (*runs, (value, "patchkv", ours))))
    return cases


def _varied(setup: RecoverySetup, config: ResumeConfig, value: Any) -> RecoverySetup:
    if config.sweep == "precision":
        return method(PRECISIONS[value])
    changes = {"rule": Blocks(value)} if config.sweep == "attention" else {"block_size": value}
    # Without the limit on what is recomputed, which would take from windows what these add.
    return replace(setup, policy=setup.policy.varied(max_repaired=None, **changes))


def _context(engine: Engine, config: ResumeConfig) -> EditedContext:
    if config.position is None and config.edit_tokens is None:
        return demo_context(engine.tokenizer, config.tokens)
    return spliced_context(
        engine.tokenizer,
        config.tokens,
        position=DEFAULT_POSITION if config.position is None else config.position,
        edit_tokens=config.edit_tokens or DEFAULT_EDIT_TOKENS,
    )


def _measure(engine: Engine, config: ResumeConfig, case: _Case, *, warm_up: bool) -> list[Point]:
    context = case.context
    reference = KVSequence(engine.adapter, engine.rope).resume(context.new, RecoveryPolicy.exact())
    states = _stored_states(engine, context.old, [setup.storage for _, _, setup in case.runs])
    actions = {
        (name, value): partial(_resumed, states[setup.storage], context.new, setup.policy)
        for value, name, setup in case.runs
    }
    results = interleaved(actions, config.rounds, warm_up=warm_up)
    prefix_cache_ms = next(
        median(run.times["resume_ttft_ms"] for run in runs)
        for (name, _), runs in results.items()
        if name == "prefix_cache"
    )
    position, edit_tokens = context.edit
    shared = {
        "tokens": len(context.new),
        "tokens_old": len(context.old),
        "position": position / len(context.new),
        "edit_tokens": edit_tokens,
    }
    return [
        {
            "sweep": config.sweep,
            "value": value,
            "method": name,
            **shared,
            **_point(engine.adapter, runs, reference.logits, prefix_cache_ms),
        }
        for (name, value), runs in results.items()
    ]


def _stored_states(
    engine: Engine, old: IntArray, storages: Sequence[PrecisionPolicy]
) -> dict[PrecisionPolicy, KVSequence]:
    """The old context, prefilled once and stored at each precision."""
    exact = KVSequence(engine.adapter, engine.rope)
    exact.resume(old, RecoveryPolicy.exact(), version="old")
    exact.suspend("now")
    states = {PrecisionPolicy.lossless(): exact}
    for storage in storages:
        if storage not in states:
            stored = exact.fork(storage=storage)
            # Computes the last token alone. What an exact policy recovers is not packed.
            stored.resume(old, method("direct_reuse").policy, version="old")
            stored.suspend("now")
            states[storage] = stored
    return states


def _resumed(state: KVSequence, new: IntArray, policy: RecoveryPolicy) -> _Run:
    sequence = state.fork()
    watch = Stopwatch()
    resumed = sequence.resume(new, policy, version="new", watch=watch)
    int(resumed.logits.argmax())  # waits for a GPU
    watch.mark("sampling")
    return _Run(resumed, watch.report())


def _point(
    adapter: ModelAdapter, runs: Sequence[_Run], reference: torch.Tensor, prefix_cache_ms: float
) -> Point:
    first = runs[0].resumed
    rows = sum(first.restored_formats.values())
    ttft = timing("ttft", [run.times["resume_ttft_ms"] for run in runs])
    medians = {
        name: median(run.times[name] for run in runs)
        for name in ("planning_ms", "restore_ms", "recompute_ms")
    }
    return {
        **ttft,
        **medians,
        "speedup": prefix_cache_ms / ttft["ttft_ms"],
        "recompute_ratio": first.plan.recompute_ratio,
        "repair_ratio": first.plan.repair_ratio,
        "payload_bytes": first.payload_bytes,
        "payload_ratio": payload_ratio(first.payload_bytes, rows, adapter),
        "first_token_kl": first_token_kl(reference, first.logits),
        "top1_agree": bool(reference.argmax() == first.logits.argmax()),
    }


def _value(point: Point) -> str:
    value = point["value"]
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1%}"
    return value if isinstance(value, str) else f"{value:,}"


COLUMNS = (
    Column("value", _value),
    Column("method", lambda point: str(point["method"]).replace("_", " ")),
    Column("tokens", number("tokens")),
    Column("TTFT ms", spread("ttft")),
    Column("speedup", number("speedup", ".2f")),
    Column("of it restore", number("restore_ms", ",.0f")),
    Column("recompute", number("recompute_ms", ",.0f")),
    Column("rows computed", number("recompute_ratio", ".1%")),
    Column("payload", number("payload_ratio", ".1%")),
    Column("first-token KL", number("first_token_kl", ".5f")),
)
