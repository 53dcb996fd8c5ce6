"""A thread: one conversation of an agent, its history, and its KV state."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from patchkv_agents.checkpoint import CheckpointVersions
from patchkv_agents.context import (
    ContextVersion,
    Conversation,
    Edit,
    FrozenJson,
    Message,
    RenderedContext,
    SampledReply,
    match_messages,
    match_replies,
    message_anchors,
    parse_messages,
    parse_template_args,
    parse_tools,
    render,
)
from patchkv_agents.engine.forgetting import ForgettingLine, ancestry, came_after
from patchkv_agents.engine.generation import (
    Sampler,
    SamplingOptions,
    SamplingParams,
    TextStream,
    sampling_params,
)
from patchkv_agents.engine.reply import Reply, StreamChunk
from patchkv_agents.engine.resumed import Resumed
from patchkv_agents.engine.sequence import KVSequence
from patchkv_agents.engine.verdict import SupportLevel
from patchkv_agents.errors import CheckpointError, PatchKVError
from patchkv_agents.ranges import IntArray
from patchkv_agents.recovery.donors import Anchors
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.report import RecoveryReport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from patchkv_agents.engine.engine import Engine

Spans = tuple[tuple[int, int], ...]
"""Token span of each message."""

MOST_REPLIES = 256
"""Answers whose sampled ids are kept; those of older ones are encoded anew."""
MOST_SPANS = 32
"""Versions of which the messages' places are kept, to align others with them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One request, copied and checked."""

    conversation: Conversation
    template_args: FrozenJson
    edits: tuple[Edit, ...]
    policy: RecoveryPolicy | None
    params: SamplingParams
    rendered: RenderedContext
    render_ms: float


class Thread:
    """One conversation. Made by `Engine.thread`; its calls may not overlap."""

    def __init__(self, engine: Engine, thread_id: str, namespace: str = "") -> None:
        self.id = thread_id
        self.namespace = namespace
        self.history = engine.open_history(thread_id, namespace)
        self._engine = engine
        self._sequence = KVSequence(
            engine.adapter,
            engine.rope,
            versions=CheckpointVersions(engine.versions_budget_bytes),
            worker=engine.offload_worker,
        )
        self._stored = engine.stored_thread(thread_id, namespace)
        self._replies: deque[SampledReply] = deque(maxlen=MOST_REPLIES)
        self._spans: dict[str, Spans] = {}  # by version
        self._forgotten: str | None = None  # id of the last forgetting version that was obeyed
        self._forgetting_line = ForgettingLine()
        self._must_clear = False  # a fork forgot what this thread's state has seen
        self._busy = threading.Lock()

    @property
    def sequence(self) -> KVSequence:
        """Tokens and KV state below the messages."""
        return self._sequence

    def generate(
        self,
        messages: Sequence[Mapping[str, Any] | Message],
        *,
        tools: Sequence[Mapping[str, Any] | FrozenJson] | None = None,
        template_args: Mapping[str, Any] | None = None,
        edits: Iterable[Edit] | None = None,
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
            sampled=list(self._replies),
        )
        self._engine.check_length(len(rendered))
        render_ms = (time.perf_counter() - started) * 1e3
        call = _Call(
            conversation, arguments, tuple(edits or ()), policy, params, rendered, render_ms
        )
        return self._answer(call)

    def _answer(self, call: _Call) -> Iterator[StreamChunk]:
        with self._exclusive():
            version = self.history.commit(
                call.conversation.messages,
                tools=call.conversation.tools,
                template_args=call.template_args,
                edits=call.edits,
            )
            resumed, report, sampler, token = self._first_token(version, call)
            yield from self._decode(version, resumed, report, call.params, sampler, token)

    def suspend(self) -> None:
        """Store the KV state in CPU memory and free the cache, as while a tool runs.

        The work goes on in the background, and so does saving to the engine's store; the next call
        waits for the former.
        """
        with self._exclusive():
            self._suspend()

    def fork(self, thread_id: str) -> Thread:
        """A new thread at the same version that shares the stored state. Suspends this one."""
        with self._exclusive(), self._engine.lock:
            self._suspend()
            sequence = self._sequence.fork()  # may fail; the new thread is registered after it
            copy = self._engine.thread(thread_id, namespace=self.namespace, new=True)
            try:
                name = thread_id if self._engine.keeps_histories else None
                copy.history = self.history.fork(name, namespace=self.namespace)
            except PatchKVError:  # the history store has such a thread from an earlier time
                self._engine.drop(thread_id, namespace=self.namespace)
                raise
            copy._sequence = sequence
            copy._forgotten = self._forgotten
            copy._replies, copy._spans = self._replies.copy(), dict(self._spans)
            return copy

    def clear(self) -> None:
        """Delete all KV state, in memory and in the engine's store; the history stays.

        A thread that is answering does so at its next call.
        """
        self._must_clear = True
        if self._busy.acquire(blocking=False):
            try:
                self._clear()
            finally:
                self._busy.release()

    def _clear(self) -> None:
        with self._engine.lock:
            self._sequence.clear()
        if self._stored is not None:
            self._stored.forget(lambda version: True, sweep=True)
        self._replies.clear()
        self._must_clear = False

    def _suspend(self) -> None:
        if self._must_clear:
            self._clear()
        with self._engine.lock:
            is_live = self._sequence.is_live
            checkpoint = self._sequence.suspend()
        if is_live and checkpoint is not None and self._stored is not None:
            self._stored.save(self._sequence.version, checkpoint)

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
        sampler = Sampler(call.params, self._engine.adapter.device)
        reasons += self._forget(version, token_ids)
        started = time.perf_counter()
        reasons += self._fetch(version)
        fetch_ms = (time.perf_counter() - started) * 1e3
        with self._engine.lock:
            room = min(call.params.max_new_tokens, self._engine.max_tokens - len(token_ids))
            resumed = self._sequence.resume(
                token_ids,
                policy,
                room=room,
                version=version.id,
                anchors_of=partial(self._anchors, version, call.rendered.message_spans),
            )
            self._note_spans(version, call.rendered.message_spans)
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
            planning_ms=resumed.planning_ms,
            fetch_ms=fetch_ms,
            restore_ms=resumed.restore_ms,
            recompute_ms=resumed.recompute_ms,
            resume_ttft_ms=fetch_ms + resumed.recovery_ms + sampling_ms,
        )
        return resumed, report, sampler, token

    def _anchors(self, version: ContextVersion, spans: Spans, old: str) -> Anchors:
        """Where the messages that `version` shares with an old one stand in both."""
        if old not in self._spans:
            return ()
        matching = match_messages(self.history.get(old).messages, version.messages)
        return message_anchors(self._spans[old], spans, matching)

    def _note_spans(self, version: ContextVersion, spans: Spans) -> None:
        self._spans[version.id] = spans
        if len(self._spans) > MOST_SPANS:
            del self._spans[next(iter(self._spans))]

    def _forget(self, version: ContextVersion, token_ids: IntArray) -> list[str]:
        """Delete all state that saw what an edit up to `version` says to forget.

        Returns:
            Reasons for the report.
        """
        reasons = []
        try:
            if self._must_clear:
                self._clear()
            forgetting = self._forgetting_line.newest(self.history, version)
            if forgetting is not None and forgetting.id != self._forgotten:
                reasons += self._forget_before(forgetting, version, token_ids)
                self._forgotten = forgetting.id
        except CheckpointError as error:  # tried again at the next call
            reasons.append(f"stored state that saw forgotten text is not deleted yet: {error}")
        return reasons

    def _forget_before(
        self, forgetting: ContextVersion, version: ContextVersion, token_ids: IntArray
    ) -> list[str]:
        """Delete state of versions that did not come from `forgetting`, and that of forks."""

        def saw(version_id: str) -> bool:
            return not came_after(self.history, version_id, forgetting.id)

        reasons = []
        with self._engine.lock:
            sequence = self._sequence
            if len(sequence.token_ids) and saw(sequence.version):
                reasons.append("an edit says forget: state that saw the old text was deleted")
                sequence.truncate(sequence.clean_prefix(token_ids))
            sequence.versions.drop([kept for kept in sequence.versions if saw(kept)])
            shown = match_replies(forgetting.messages, list(self._replies)).values()
            kept_replies = [reply for reply in self._replies if reply in shown]
            self._replies = deque(kept_replies, maxlen=MOST_REPLIES)
            if forgetting.forgotten is not None:
                threads = forgetting.forgotten.threads
                self._engine.clear_forks(self, threads, forgetting.id)
        if self._stored is not None:
            self._stored.forget(saw, sweep=forgetting.id == version.id)
        return reasons

    def _fetch(self, version: ContextVersion) -> list[str]:
        """Where there is no state in memory, take what the store has.

        Returns:
            Reasons for the report.
        """
        if self._stored is None or len(self._sequence.token_ids) or len(self._sequence.versions):
            return []
        try:
            found = self._stored.newest(past.id for past in ancestry(self.history, version))
            if found is not None:
                self._sequence.adopt(*found)
        except CheckpointError as error:
            return [f"stored state could not be read: {error}"]
        return []

    def _decode(
        self,
        version: ContextVersion,
        resumed: Resumed,
        report: RecoveryReport,
        params: SamplingParams,
        sampler: Sampler,
        token: int,
    ) -> Iterator[StreamChunk]:
        text = TextStream(self._engine.tokenizer, params.stop)
        sampled: list[int] = []
        limit = min(params.max_new_tokens, self._engine.max_tokens - report.tokens)
        finish_reason = "stop"
        try:
            while token not in self._engine.end_tokens:
                sampled.append(token)
                piece = text.add(token)
                if piece:
                    yield StreamChunk(piece)
                if text.stopped:
                    break
                if len(sampled) == limit:
                    finish_reason = "length"
                    break
                with self._engine.lock:
                    token = sampler(self._sequence.append(token))
        finally:  # also what was said before the stream was closed
            self._replies.append(SampledReply.of(sampled, self._engine.tokenizer))
        rest = text.finish()
        reply = Reply(
            text=text.text,
            token_ids=tuple(sampled),
            finish_reason=finish_reason,
            report=report,
            plan=resumed.plan,
            version_id=version.id,
            first_logits=resumed.logits,
        )
        yield StreamChunk(rest, reply)

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
