"""What an engine tells an observer of each answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from patchkv_agents.context import ContextHistory, ContextVersion, Edit, ThreadKey
from patchkv_agents.engine.generation import SamplingParams
from patchkv_agents.engine.reply import Reply
from patchkv_agents.recovery.plan import RecoveryPlan
from patchkv_agents.recovery.report import RecoveryReport


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """One answer of a thread.

    Attributes:
        thread: the thread.
        model: name of the model.
        history: of the thread.
        version: the context that was answered.
        edits: what was changed since the answer before; nothing where the same was asked again.
        report: how its KV state was obtained.
        plan: what was done with each token of the prompt, and why.
        params: how the answer was sampled.
        reply: the answer; None if its stream was closed before the end.
        error: what ended the answer, if something did.
        started_ns: nanoseconds since the epoch when the call was taken up.
        ended_ns: when the answer was complete.
    """

    thread: ThreadKey
    model: str
    history: ContextHistory
    version: ContextVersion
    edits: tuple[Edit, ...]
    report: RecoveryReport
    plan: RecoveryPlan
    params: SamplingParams
    reply: Reply | None
    error: Exception | None
    started_ns: int
    ended_ns: int


Observer = Callable[[Answered], None]
"""Called once for each answer, in the thread that took it. What it raises is logged."""
