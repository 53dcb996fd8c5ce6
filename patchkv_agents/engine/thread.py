"""A thread: one conversation of an agent, its history, and its KV state."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from patchkv_agents.backends.transformers.verdict import SupportLevel
from patchkv_agents.checkpoint import CheckpointVersions
from patchkv_agents.context import (
    ContextHistory,
    ContextVersion,
    Conversation,
    Edit,
    FrozenJson,
    Message,
    RenderedContext,
    SampledReply,
    ThreadKey,
    parse_messages,
    parse_template_args,
    parse_tools,
    render,
)
from patchkv_agents.engine.answer import Answer
from patchkv_agents.engine.generation import (
    SamplingOptions,
    SamplingParams,
    sampling_params,
)
from patchkv_agents.engine.outcomes import AnsweredCall, CallOutcome, FailedCall
from patchkv_agents.engine.reply import Reply, StreamChunk
from patchkv_agents.engine.resumed import Resumed
from patchkv_agents.engine.sampler import Sampler
from patchkv_agents.engine.sequence import KVSequence
from patchkv_agents.engine.stopwatch import Stopwatch
from patchkv_agents.engine.thread_state import ThreadState
from patchkv_agents.errors import PatchKVError
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.report import RecoveryReport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from patchkv_agents.context.versioning.views import Ref
    from patchkv_agents.engine.engine import Engine

MAX_OMITTED = 32
"""Fields that a report names of those which the chat template does not show."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One request, copied and checked."""

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


@dataclass(slots=True, eq=False)
class _Run:
    """How far a call has come."""

    version: ContextVersion | None = None
    edits: tuple[Edit, ...] = ()
    resumed: Resumed | None = None
    report: RecoveryReport | None = None
    reply: Reply | None = None
    error: BaseException | None = None

    def outcome(self, **call: Any) -> CallOutcome:
        """What an observer gets; `call` has the fields that do not depend on it."""
        if self.version is None or self.resumed is None or self.report is None:
            error = self.error or RuntimeError("the call ended before its first token")
            return FailedCall(version=self.version, edits=self.edits, error=error, **call)
        return AnsweredCall(
            version=self.version,
            edits=self.edits,
            report=self.report,
            plan=self.resumed.plan,
            reply=self.reply,
            error=self.error,
            **call,
        )


class Thread:
    """One conversation. Made by `Engine.thread`; its calls may not overlap."""

    def __init__(self, engine: Engine, thread_id: str, namespace: str = "") -> None:
        self.id = thread_id
        self.namespace = namespace
        self._engine = engine
        self._state = ThreadState(
            engine.open_history(thread_id, namespace),
            KVSequence(
                engine.adapter,
                engine.rope,
                versions=CheckpointVersions(engine.versions_budget_bytes),
                worker=engine.offload_worker,
            ),
            engine.stored_thread(thread_id, namespace),
        )
        self._busy = threading.Lock()

    @property
    def engine(self) -> Engine:
        """That runs it."""
        return self._engine

    @property
    def history(self) -> ContextHistory:
        """The versions of its context."""
        return self._state.history

    @property
    def sequence(self) -> KVSequence:
        """Tokens and KV state below the messages."""
        return self._state.sequence

    def generate(
        self,
        messages: Sequence[Mapping[str, Any] | Message],
        *,
        tools: Sequence[Mapping[str, Any] | FrozenJson] | None = None,
        template_args: Mapping[str, Any] | None = None,
        edits: Iterable[Edit] | None = None,
        parent: Ref | None = None,
        checkpoint_id: str | None = None,
        policy: RecoveryPolicy | None = None,
        called_ns: int | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Reply:
        """Answer `messages`, reusing the state of the previous call as far as the policy allows.

        Args:
            messages: the whole conversation, in OpenAI form. Copied.
            tools: tool schemas for the chat template.
            template_args: further arguments of the chat template.
            edits: what the caller knows of the changes since the last call. One marked `forget`
                deletes all state that saw the old text, that of forks and in the store too.
            parent: the version that the context was made from, and whose state it may recover
                from with what that came from; of others, only what is exact, and so if it is the
                empty string, which is none at all. Left out, it is the one answered last, or an
                earlier one that the messages go back to (see `base`).
            checkpoint_id: the agent framework's, kept with the version.
            policy: for this call; the engine's otherwise.
            called_ns: when the user's call arrived, by `time.perf_counter_ns`; now if left out.
                The report's `ttft_ms` counts from there.
            sampling: fields of `SamplingParams`; greedy by default.

        Raises:
            ContextError: malformed or empty messages.
            ContextTooLongError: the context leaves no room for an answer.
            PatchKVError: the thread is answering already.
        """
        reply: Reply | None = None
        for chunk in self.stream(
            messages,
            tools=tools,
            template_args=template_args,
            edits=edits,
            parent=parent,
            checkpoint_id=checkpoint_id,
            policy=policy,
            called_ns=called_ns,
            **sampling,
        ):
            reply = chunk.reply
        if reply is None:
            raise RuntimeError("the stream ended without a reply")
        return reply

    def stream(
        self,
        messages: Sequence[Mapping[str, Any] | Message],
        *,
        tools: Sequence[Mapping[str, Any] | FrozenJson] | None = None,
        template_args: Mapping[str, Any] | None = None,
        edits: Iterable[Edit] | None = None,
        parent: Ref | None = None,
        checkpoint_id: str | None = None,
        policy: RecoveryPolicy | None = None,
        called_ns: int | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[StreamChunk]:
        """As `generate`, but yields text as it appears. May be closed at any point.

        Arguments are copied and checked at the call; the model runs when the first piece is asked
        for.
        """
        watch = Stopwatch(self._engine.clock_ns, called_ns)
        started_ns = time.time_ns()
        watch.mark("wait")
        params = sampling_params(sampling)
        conversation = Conversation(parse_messages(messages), parse_tools(tools))
        arguments = parse_template_args(template_args)
        replies = self._state.replies
        rendered = self._rendered(conversation, arguments, replies)
        watch.mark("render")
        call = _Call(
            conversation,
            arguments,
            tuple(edits or ()),
            parent,
            checkpoint_id,
            policy,
            params,
            rendered,
            replies,
            watch,
            started_ns - int(watch.ms("wait") * 1e6),
        )
        return self._answer(call)

    def _rendered(
        self,
        conversation: Conversation,
        template_args: FrozenJson,
        replies: tuple[SampledReply, ...],
    ) -> RenderedContext:
        rendered = render(
            conversation,
            self._engine.tokenizer,
            template_args=template_args.load(),
            sampled=list(replies),
        )
        self._engine.check_length(len(rendered))
        return rendered

    def _answer(self, call: _Call) -> Iterator[StreamChunk]:
        with self._exclusive(), self._engine.answering():
            run = _Run()
            try:
                call.watch.mark("wait")
                if self._state.replies is not call.replies:  # another call has answered meanwhile
                    rendered = self._rendered(
                        call.conversation, call.template_args, self._state.replies
                    )
                    call = replace(call, rendered=rendered)
                    call.watch.mark("render")
                run.version, run.edits = self._state.place(
                    call.conversation,
                    call.template_args,
                    edits=call.edits,
                    parent=call.parent,
                    checkpoint_id=call.checkpoint_id,
                )
                call.watch.mark("history")
                run.resumed, run.report, sampler, token = self._first_token(run.version, call)
                for chunk in self._decode(
                    run.version, run.edits, run.resumed, run.report, call.params, sampler, token
                ):
                    run.reply = chunk.reply
                    yield chunk
            except GeneratorExit:  # closed by the caller
                raise
            except BaseException as error:
                run.error = error
                raise
            finally:
                self._finish(call, run)

    def _finish(self, call: _Call, run: _Run) -> None:
        """Report what became of a call."""
        self._engine.notify(
            run.outcome(
                thread=ThreadKey(self.id, self.namespace),
                model=self._engine.model_name,
                history=self.history,
                params=call.params,
                started_ns=call.started_ns,
                ended_ns=time.time_ns(),
            )
        )
        if run.reply is not None:
            key = ThreadKey(self.id, self.namespace)
            self._engine.check_in_shadow(key, call.rendered.token_ids, run.reply)

    def base(self, messages: Sequence[Message]) -> ContextVersion | None:
        """The version that a context will be taken to go on from; None for the first one.

        Which is the one answered last, unless the messages are those of an earlier one, and an
        answer to it that was not followed before.
        """
        return self._state.base(messages)

    def suspend(self) -> None:
        """Store the KV state in CPU memory and free the cache, as while a tool runs.

        The work goes on in the background, and so does saving to the engine's store; the next call
        waits for the former.
        """
        with self._exclusive():
            self._state.suspend()

    def fork(self, thread_id: str) -> Thread:
        """A new thread at the same version that shares the stored state. Suspends this one."""
        with self._exclusive():
            self._state.suspend()
            sequence = self.sequence.fork()  # may fail; the new thread is registered after it
            with self._engine.registry:  # nobody gets hold of it half made
                copy = self._engine.thread(thread_id, namespace=self.namespace, new=True)
                try:
                    name = thread_id if self._engine.keeps_histories else None
                    copy._state.history = self.history.fork(name, namespace=self.namespace)
                except PatchKVError:  # the history store has such a thread from an earlier time
                    self._engine.drop(thread_id, namespace=self.namespace)
                    raise
                copy._state.take_over(self._state, sequence)
            return copy

    def share_prefix(
        self,
        source: Thread,
        messages: Sequence[Mapping[str, Any] | Message],
        *,
        tools: Sequence[Mapping[str, Any] | FrozenJson] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> int:
        """Begin with what another thread has of the first tokens of a context.

        For a thread without state whose first context begins like one of `source`, as with the
        same system prompt. It gets rows of the common tokens and nothing else: neither history nor
        any row that has seen what follows. `source` stays as it is.

        Args:
            source: another thread of this engine, which is not answering.
            messages, tools, template_args: of the context to come, as for `generate`.

        Returns:
            How many tokens are common.

        Raises:
            ContextError: malformed or empty messages.
            PatchKVError: a thread is answering, or this one has state.
        """
        rendered = render(
            Conversation(parse_messages(messages), parse_tools(tools)),
            self._engine.tokenizer,
            template_args=template_args,
        )
        with self._exclusive(), source._exclusive():
            if len(self.sequence.token_ids):
                raise PatchKVError(f"thread '{self.id}' has state already: use a new one")
            if source._state.must_clear:
                return 0
            self._state.sequence = source.sequence.copy_prefix(rendered.token_ids)
            return len(self.sequence.token_ids)

    def clear(self) -> None:
        """Delete all KV state, in memory and in the engine's store; the history stays.

        A thread that is answering does so at its next call.
        """
        self._state.must_clear = True
        if self._busy.acquire(blocking=False):
            try:
                self._state.clear()
            finally:
                self._busy.release()

    def clear_for(self, forgetting: str) -> None:
        """As `clear`, once for each version of another thread that says to forget.

        Args:
            forgetting: that version's id.

        Raises:
            CheckpointError: the store cannot delete; tried again at the next call.
        """
        if self._busy.acquire(blocking=False):
            try:
                self._state.clear_for(forgetting)
            finally:
                self._busy.release()
        else:
            self._state.must_clear = True

    def _first_token(
        self, version: ContextVersion, call: _Call
    ) -> tuple[Resumed, RecoveryReport, Sampler, int]:
        token_ids, policy = call.rendered.token_ids, call.policy or self._engine.policy
        reasons = []
        if not call.rendered.verified and not policy.is_exact:
            reasons.append(f"token spans could not be verified: {call.rendered.reason}")
            policy = RecoveryPolicy.exact()
        verdict = self._engine.support.verdict
        if verdict.level is SupportLevel.EXACT and not policy.is_exact:
            reasons.append(f"keys of this model cannot be moved: {verdict.reason}")
            policy = RecoveryPolicy.exact()
        adapter = self._engine.adapter
        sampler = Sampler(
            call.params, token_ids.tolist(), adapter.model.generation_config, adapter.device
        )
        clear_forks = partial(self._engine.clear_forks, self)
        reasons += self._state.forget(version, token_ids, clear_forks)
        if self._engine.shadow is not None and any(edit.forget for edit in version.edits):
            self._engine.shadow.forget()
        reasons += self._state.fetch(version)
        call.watch.mark("fetch")
        room = min(call.params.max_new_tokens, self._engine.max_tokens - len(token_ids))
        resumed = self.sequence.resume(
            token_ids,
            policy,
            room=room,
            version=version.id,
            anchors_of=partial(self._state.anchors, version, call.rendered.message_spans),
            own_of=self._state.own_rows(version),
            watch=call.watch,
        )
        self._state.note(version, call.rendered.message_spans, resumed)
        token = sampler(resumed.logits)
        call.watch.mark("sampling")
        if resumed.trouble:
            reasons.append(resumed.trouble)
        report = RecoveryReport.of_plan(
            resumed.plan,
            policy=policy.name,
            fallback_reason="; ".join(reasons) or None,
            resumed_from=resumed.resumed_from,
            restored_formats=resumed.restored_formats,
            payload_bytes=resumed.payload_bytes,
            omitted=call.rendered.omitted[:MAX_OMITTED],
            notes=call.rendered.notes,
            **call.watch.report(),
        )
        return resumed, report, sampler, token

    def _decode(
        self,
        version: ContextVersion,
        edits: tuple[Edit, ...],
        resumed: Resumed,
        report: RecoveryReport,
        params: SamplingParams,
        sampler: Sampler,
        token: int,
    ) -> Iterator[StreamChunk]:
        engine = self._engine
        limit = min(params.max_new_tokens, engine.max_tokens - report.tokens)
        answer = Answer(engine.tokenizer, engine.end_tokens, params, sampler, limit)
        try:
            yield from answer.pieces(token, self.sequence.append)
        finally:  # also what was said before the stream was closed
            self._state.add_reply(SampledReply.of(answer.token_ids, engine.tokenizer))
        last = answer.finish()
        reply = Reply(
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason,
            report=report,
            plan=resumed.plan,
            version_id=version.id,
            first_logits=resumed.logits,
            edits=edits,
            logprobs=None if params.logprobs is None else answer.logprobs,
        )
        yield replace(last, reply=reply)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise PatchKVError(
                f"thread '{self.id}' is answering already: finish or close its stream first, or "
                "use another thread"
            )
        try:
            yield
        finally:
            self._busy.release()
