"""One call of a thread: what was asked, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkv_agents.context import (
    ContextVersion,
    Conversation,
    Edit,
    FrozenJson,
    RenderedContext,
    SampledReply,
)
from patchkv_agents.engine.generation import SamplingParams
from patchkv_agents.engine.outcomes import AnsweredCall, CallOutcome, FailedCall
from patchkv_agents.engine.reply import Reply
from patchkv_agents.engine.resumed import Resumed
from patchkv_agents.engine.sampler import Sampler
from patchkv_agents.engine.stopwatch import Stopwatch
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.report import RecoveryReport

if TYPE_CHECKING:
    from patchkv_agents.context.versioning.views import Ref


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What was asked, copied and checked.

    Attributes:
        conversation, template_args: what the model is shown.
        edits, parent, checkpoint_id: see `Thread.generate`.
        policy: of the recovery; None is the thread's.
        params: how the answer is sampled.
        rendered: tokens and spans.
        replies: sampled ids with which it was rendered.
        watch: times of the call.
        started_ns: nanoseconds since the epoch at the call.
    """

    conversation: Conversation
    template_args: FrozenJson
    edits: tuple[Edit, ...]
    parent: Ref | None
    checkpoint_id: str | None
    policy: RecoveryPolicy | None
    params: SamplingParams
    rendered: RenderedContext
    replies: tuple[SampledReply, ...]
    watch: Stopwatch
    started_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A context whose state is there, and the first token of its answer."""

    resumed: Resumed
    report: RecoveryReport
    sampler: Sampler
    first_token: int


@dataclass(slots=True, eq=False)
class Progress:
    """How far a call has come; what is not there yet is None."""

    version: ContextVersion | None = None
    edits: tuple[Edit, ...] = ()
    prefilled: Prefilled | None = None
    reply: Reply | None = None
    error: BaseException | None = None

    def outcome(self, **call: Any) -> CallOutcome:
        """What an observer gets; `call` has the fields that do not depend on the progress."""
        if self.version is None or self.prefilled is None:
            error = self.error or RuntimeError("the call ended before its first token")
            return FailedCall(version=self.version, edits=self.edits, error=error, **call)
        return AnsweredCall(
            version=self.version,
            edits=self.edits,
            report=self.prefilled.report,
            plan=self.prefilled.resumed.plan,
            reply=self.reply,
            error=self.error,
            **call,
        )
