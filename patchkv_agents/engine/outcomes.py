"""What an engine reports to an observer of each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from patchkv_agents.context import ContextHistory, ContextVersion, Edit, ThreadKey
from patchkv_agents.engine.generation import SamplingParams
from patchkv_agents.engine.reply import Reply
from patchkv_agents.recovery.plan import RecoveryPlan
from patchkv_agents.recovery.report import RecoveryReport


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FailedCall:
    """A call that ended with an error before its first token.

    Attributes:
        thread: the thread.
        model: name of the model.
        history: of the thread.
        version: the context; None if it could not be committed.
        edits: what was changed since the answer before; nothing where the same was asked again.
        params: how the answer was to be sampled.
        error: what ended the call.
        started_ns: nanoseconds since the epoch at the call.
        ended_ns: when it ended.
    """

    thread: ThreadKey
    model: str
    history: ContextHistory
    version: ContextVersion | None
    edits: tuple[Edit, ...]
    params: SamplingParams
    error: BaseException
    started_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AnsweredCall:
    """A call that got as far as its first token.

    Attributes:
        thread, model, history, edits, params, started_ns: as of a `FailedCall`.
        version: the context that was answered.
        report: how its KV state was obtained.
        plan: what was done with each token of the prompt, and why.
        reply: the answer; None if its stream was closed before the end.
        error: what ended the answer, if something did.
        ended_ns: when the answer was complete.
    """

    thread: ThreadKey
    model: str
    history: ContextHistory
    version: ContextVersion
    edits: tuple[Edit, ...]
    params: SamplingParams
    report: RecoveryReport
    plan: RecoveryPlan
    reply: Reply | None
    error: BaseException | None
    started_ns: int
    ended_ns: int


CallOutcome = AnsweredCall | FailedCall

Observer = Callable[[CallOutcome], None]
"""Called once for each call, in the Python thread that took it. What it raises is logged."""
