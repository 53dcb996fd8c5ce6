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
from patchkv_agents.engine.observing import Answered
from patchkv_agents.engine.reply import Reply, StreamChunk
from patchkv_agents.engine.resumed import Resumed
from patchkv_agents.engine.sampler import Sampler
from patchkv_agents.engine.sequence import KVSequence
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
    render_ms: float


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
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[StreamChunk]:
        """As `generate`, but yields text as it appears. May be closed at any point.

        Arguments are copied and checked at the call; the model runs when the first piece is asked
        for.
        """
        params = sampling_params(sampling)
        started = time.perf_counter()
        conversation = Conversation(parse_messages(messages), parse_tools(tools))
        arguments = parse_template_args(template_args)
        rendered = render(
            conversation,
            self._engine.tokenizer,
            template_args=arguments.load(),
            sampled=list(self._state.replies),
        )
        self._engine.check_length(len(rendered))
        render_ms = (time.perf_counter() - started) * 1e3
        call = _Call(
            conversation,
            arguments,
            tuple(edits or ()),
            parent,
            checkpoint_id,
            policy,
            params,
            rendered,
            render_ms,
        )
        return self._answer(call)

    def _answer(self, call: _Call) -> Iterator[StreamChunk]:
        with self._exclusive(), self._engine.answering():
            version, edits = self._state.place(
                call.conversation,
                call.template_args,
                edits=call.edits,
                parent=call.parent,
                checkpoint_id=call.checkpoint_id,
            )
            started_ns = time.time_ns()
            resumed, report, sampler, token = self._first_token(version, call)
            reply, error = None, None
            try:
                for chunk in self._decode(
                    version, edits, resumed, report, call.params, sampler, token
                ):
                    reply = chunk.reply
                    yield chunk
            except Exception as caught:
                error = caught
                raise
            finally:
                self._engine.notify(
                    Answered(
                        thread=ThreadKey(self.id, self.namespace),
                        model=self._engine.model_name,
                        history=self.history,
                        version=version,
                        edits=edits,
                        report=report,
                        plan=resumed.plan,
                        params=call.params,
                        reply=reply,
                        error=error,
                        started_ns=started_ns,
                        ended_ns=time.time_ns(),
                    )
                )
                if reply is not None:
                    key = ThreadKey(self.id, self.namespace)
                    self._engine.check_in_shadow(key, call.rendered.token_ids, reply)

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
        started = time.perf_counter()
        reasons += self._state.fetch(version)
        fetch_ms = (time.perf_counter() - started) * 1e3
        room = min(call.params.max_new_tokens, self._engine.max_tokens - len(token_ids))
        resumed = self.sequence.resume(
            token_ids,
            policy,
            room=room,
            version=version.id,
            anchors_of=partial(self._state.anchors, version, call.rendered.message_spans),
            own_of=self._state.own_rows(version),
        )
        self._state.note(version, call.rendered.message_spans, resumed)
        started = time.perf_counter()
        token = sampler(resumed.logits)
        sampling_ms = (time.perf_counter() - started) * 1e3
        if resumed.trouble:
            reasons.append(resumed.trouble)
        report = RecoveryReport.of_plan(
            resumed.plan,
            policy=policy.name,
            fallback_reason="; ".join(reasons) or None,
            resumed_from=resumed.resumed_from,
            restored_formats=resumed.restored_formats,
            payload_bytes=resumed.payload_bytes,
            render_ms=call.render_ms,
            omitted=call.rendered.omitted[:MAX_OMITTED],
            notes=call.rendered.notes,
            planning_ms=resumed.planning_ms,
            fetch_ms=fetch_ms,
            restore_ms=resumed.restore_ms,
            recompute_ms=resumed.recompute_ms,
            resume_ttft_ms=fetch_ms + resumed.recovery_ms + sampling_ms,
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
            self._state.replies.append(SampledReply.of(answer.token_ids, engine.tokenizer))
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
