"""One call of a thread: what was asked, and how far it has come."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from patchkv_agents.backends.transformers.verdict import SupportLevel, Verdict
from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.context import (
    ContextVersion,
    Conversation,
    Edit,
    FrozenJson,
    RenderedContext,
    SampledReply,
    ThreadKey,
    render,
)
from patchkv_agents.engine.decoder import AnswerDecoder
from patchkv_agents.engine.generation import SamplingParams
from patchkv_agents.engine.outcomes import AnsweredCall, CallOutcome, FailedCall
from patchkv_agents.engine.reply import Reply
from patchkv_agents.engine.resumed import Resumed
from patchkv_agents.engine.runtime import ModelRuntime
from patchkv_agents.engine.sampler import Sampler
from patchkv_agents.engine.stopwatch import Stopwatch
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.report import RecoveryReport

if TYPE_CHECKING:
    from patchkv_agents.context.versioning.views import Ref


AnyThread = TypeVar("AnyThread")


class ThreadHost(Protocol[AnyThread]):
    """What a thread needs of the pool that it belongs to.

    Attributes:
        policy: how contexts are recovered unless a call says otherwise.
    """

    policy: RecoveryPolicy

    def fork(
        self, thread: AnyThread, thread_id: str, storage: PrecisionPolicy | None = None
    ) -> AnyThread:
        """A new thread at the same version; `thread` is locked meanwhile."""

    def clear_forks(
        self, thread: AnyThread, histories: Collection[ThreadKey], forgetting: str
    ) -> None:
        """Delete the KV state of the threads of these histories, `thread` itself left out.

        Args:
            thread: was told to forget.
            histories: that saw the same.
            forgetting: id of the version that says so.

        Raises:
            CheckpointError: the store cannot delete it.
        """

    def keeping_within_memory(self) -> AbstractContextManager[None]:
        """Brings the state of all threads into the memory budget when it is left."""


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

    def renewed(self, replies: tuple[SampledReply, ...], runtime: ModelRuntime) -> Request:
        """The request, rendered anew if another call has answered since it was made."""
        self.watch.mark("wait")
        if replies is self.replies:
            return self
        rendered = render_checked(self.conversation, self.template_args, replies, runtime)
        self.watch.mark("render")
        return replace(self, rendered=rendered, replies=replies)

    def safe_policy(
        self, default: RecoveryPolicy, verdict: Verdict
    ) -> tuple[RecoveryPolicy, list[str]]:
        """The policy of the request or the thread, or the exact one with the reasons for it."""
        policy = self.policy or default
        if policy.is_exact:
            return policy, []
        reasons = []
        if not self.rendered.verified:
            reasons.append(f"token spans could not be verified: {self.rendered.reason}")
        if verdict.level is SupportLevel.EXACT:
            reasons.append(f"keys of this model cannot be moved: {verdict.reason}")
        return (RecoveryPolicy.exact() if reasons else policy), reasons


def render_checked(
    conversation: Conversation,
    template_args: FrozenJson,
    replies: tuple[SampledReply, ...],
    runtime: ModelRuntime,
) -> RenderedContext:
    """Tokens and spans of a context that leaves room for an answer.

    Raises:
        ContextError: nothing is rendered.
        ContextTooLongError: there is no room.
    """
    rendered = render(
        conversation,
        runtime.tokenizer,
        template_args=template_args.load(),
        sampled=list(replies),
    )
    runtime.check_length(len(rendered))
    return rendered


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A context whose state is there, and the first token of its answer."""

    resumed: Resumed
    report: RecoveryReport
    sampler: Sampler
    first_token: int

    def reply(
        self,
        version_id: str,
        edits: tuple[Edit, ...],
        decoder: AnswerDecoder,
        params: SamplingParams,
    ) -> Reply:
        """The answer to a version that these edits made, once it is decoded."""
        return Reply(
            text=decoder.text,
            token_ids=tuple(decoder.token_ids),
            finish_reason=decoder.finish_reason,
            report=self.report,
            plan=self.resumed.plan,
            version_id=version_id,
            first_logits=self.resumed.logits,
            edits=edits,
            logprobs=None if params.logprobs is None else decoder.logprobs,
        )


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
