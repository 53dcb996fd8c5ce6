"""One edited context resumed by several methods on one engine, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from patchkv_agents.context import ContextVersion, Conversation
from patchkv_agents.divergence import first_token_kl
from patchkv_agents.engine import Engine, Reply, Thread
from patchkv_agents.profiling.states import SharedStates
from patchkv_agents.progress import Progress, ProgressCallback, ignore_progress
from patchkv_agents.recovery import RecoveryPolicy, RecoverySetup

CONTINUATION_TOKENS = 16
"""Greedy tokens that must all be equal for `exact_continuation`."""

TIMES = ("render_ms", "planning_ms", "restore_ms", "recompute_ms", "resume_ttft_ms")


@dataclass(frozen=True, slots=True, eq=False)
class MethodResult:
    """What one method did, compared with a full prefill of the new context.

    Attributes:
        reply: of the first round; times in its report are medians over all rounds.
        rounds_ms: `resume_ttft_ms` of every round.
        first_token_kl: KL(full prefill || method) of the first output token, in nats.
        top1_agree: whether both have the same most likely first token.
        exact_continuation: whether the first 16 greedy tokens (or all, if fewer) are equal.
    """

    reply: Reply
    rounds_ms: tuple[float, ...]
    first_token_kl: float
    top1_agree: bool
    exact_continuation: bool


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """How the methods did on one edit.

    Attributes:
        old_reply: the answer before the edit.
        versions: the context before and after the edit, as the threads' history has them.
        methods: by name, `full_prefill` among them.
    """

    old_reply: Reply
    versions: tuple[ContextVersion, ...]
    methods: Mapping[str, MethodResult]

    @property
    def new_version(self) -> ContextVersion:
        """The context after the edit."""
        return self.versions[-1]


def compare_methods(
    engine: Engine,
    old: Conversation,
    new: Conversation,
    methods: Sequence[RecoverySetup],
    *,
    rounds: int = 1,
    max_new_tokens: int = 24,
    progress: ProgressCallback = ignore_progress,
) -> Comparison:
    """Answer `old`, suspend, then answer `new` by every method from that state.

    Each method's state is stored at its own precision. Rounds are interleaved: each runs every
    method once, the full prefill first.

    Args:
        engine: runs everything, on threads whose names begin with `compare/`.
        old, new: the context before and after the edit.
        methods: results carry their names.
        rounds: how often every method runs. Answers come from the first round.
        max_new_tokens: of each answer; at least `CONTINUATION_TOKENS` are generated.
        progress: called at the beginning of each step.
    """
    answer_tokens = max(max_new_tokens, CONTINUATION_TOKENS)
    steps = rounds * (len(methods) + 1)
    progress(Progress("prefill of the old context", 0, steps + 1))
    maps = any(setup.policy.method.needs_map for setup in methods)
    with SharedStates(engine, answer_tokens=answer_tokens, maps=maps) as states:
        old_state = states.exact(old)
        origins: dict[str, Thread | None] = {"full_prefill": None}
        origins |= {setup.name: states.stored(old, setup.storage).thread for setup in methods}
        plans = {"full_prefill": RecoveryPolicy.exact()}
        plans |= {setup.name: setup.policy for setup in methods}
        replies: dict[str, list[Reply]] = {name: [] for name in plans}
        for step in range(steps):
            name = list(plans)[step % len(plans)]
            progress(Progress(name.replace("_", " "), step + 1, steps + 1))
            thread, reply = states.resume(
                origins[name],
                new,
                plans[name],
                max_new_tokens=answer_tokens if step < len(plans) else 1,
            )
            states.release(thread)
            replies[name].append(reply)
        history = old_state.thread.history.fork()
    history.commit(new.messages, tools=new.tools)
    results = {
        name: method_result(replies["full_prefill"][0], runs) for name, runs in replies.items()
    }
    return Comparison(old_state.reply, history.log()[::-1], results)


def method_result(reference: Reply, runs: Sequence[Reply]) -> MethodResult:
    """Put the runs of one method, first round first, beside the full prefill's first answer.

    Raises:
        PatchKVError: logits are not numbers.
    """
    first = runs[0]
    times: dict[str, Any] = {
        name: median(getattr(reply.report, name) for reply in runs) for name in TIMES
    }
    return MethodResult(
        reply=replace(first, report=replace(first.report, **times)),
        rounds_ms=tuple(reply.report.resume_ttft_ms for reply in runs),
        first_token_kl=first_token_kl(reference.first_logits, first.first_logits),
        top1_agree=bool(reference.first_logits.argmax() == first.first_logits.argmax()),
        exact_continuation=reference.token_ids[:CONTINUATION_TOKENS]
        == first.token_ids[:CONTINUATION_TOKENS],
    )
