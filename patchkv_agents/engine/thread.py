"""A thread: one conversation of an agent, its history, and its KV state."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from patchkv_agents.alignment import align
from patchkv_agents.context import (
    ContextHistory,
    ContextVersion,
    Conversation,
    Edit,
    FrozenJson,
    Message,
    RenderedContext,
    parse_messages,
    parse_template_args,
    parse_tools,
    render,
)
from patchkv_agents.engine.generation import (
    Sampler,
    SamplingOptions,
    SamplingParams,
    TextStream,
    sampling_params,
)
from patchkv_agents.engine.sequence import KVSequence, Resumed
from patchkv_agents.errors import PatchKVError
from patchkv_agents.recovery.plan import RecoveryPlan
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.report import RecoveryReport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from patchkv_agents.engine.engine import Engine


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """What the model answered.

    Attributes:
        text: the answer, without special tokens and stop string.
        token_ids: sampled ids, the end-of-turn token not among them.
        finish_reason: `"stop"` (end of turn or stop string) or `"length"`.
        report: how the context's KV state was obtained.
        plan: the same, token by token.
        version_id: id of the context version that was answered.
        first_logits: logits of the first output token, `[vocab]`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    report: RecoveryReport
    plan: RecoveryPlan
    version_id: str
    first_logits: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StreamChunk:
    """A piece of a streamed answer; `reply` is set on the last one only."""

    text: str
    reply: Reply | None = None


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

    def __init__(self, engine: Engine, thread_id: str) -> None:
        self.id = thread_id
        self.history = ContextHistory()
        self._engine = engine
        self._sequence = KVSequence(engine.adapter, engine.rope)
        self._recovered: str | None = None  # id of the version whose state the sequence has
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
                deletes this thread's state that saw the old text; forks made before keep theirs.
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
        rendered = render(conversation, self._engine.tokenizer, template_args=arguments.load())
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

    def suspend(self) -> int:
        """Store the KV state in CPU memory and free the cache, as while a tool runs.

        Returns:
            Bytes that were copied; 0 if the thread was suspended already.
        """
        with self._exclusive(), self._engine.lock:
            return self._sequence.suspend()

    def fork(self, thread_id: str) -> Thread:
        """A new thread at the same version that shares the stored state. Suspends this one."""
        with self._exclusive(), self._engine.lock:
            sequence = self._sequence.fork()  # may fail; the new thread is registered after it
            copy = self._engine.thread(thread_id, new=True)
            copy.history, copy._sequence = self.history.copy(), sequence
            copy._recovered = self._recovered
            return copy

    def _first_token(
        self, version: ContextVersion, call: _Call
    ) -> tuple[Resumed, RecoveryReport, Sampler, int]:
        token_ids, policy = call.rendered.token_ids, call.policy or self._engine.policy
        reasons = []
        if not call.rendered.verified and not policy.is_exact:
            reasons.append(f"token spans could not be verified: {call.rendered.reason}")
            policy = RecoveryPolicy.exact()
        sampler = Sampler(call.params, self._engine.adapter.device)
        with self._engine.lock:
            if self._forgets_something(version):
                reasons.append("an edit says forget: state that saw the old text was deleted")
                self._sequence.truncate(align(self._sequence.token_ids, token_ids).prefix)
            room = min(call.params.max_new_tokens, self._engine.max_tokens - len(token_ids))
            resumed = self._sequence.resume(token_ids, policy, room=room)
            self._recovered = version.id
            started = time.perf_counter()
            token = sampler(resumed.logits)
            sampling_ms = (time.perf_counter() - started) * 1e3
        report = RecoveryReport.of_plan(
            resumed.plan,
            policy=policy.name,
            fallback_reason="; ".join(reasons) or None,
            payload_bytes=resumed.payload_bytes,
            render_ms=call.render_ms,
            planning_ms=resumed.planning_ms,
            restore_ms=resumed.restore_ms,
            recompute_ms=resumed.recompute_ms,
            resume_ttft_ms=resumed.recovery_ms + sampling_ms,
        )
        return resumed, report, sampler, token

    def _forgets_something(self, version: ContextVersion) -> bool:
        """Whether an edit since the version whose state is held is marked `forget`."""
        while version.id != self._recovered:
            if any(edit.forget for edit in version.edits):
                return True
            if not version.parents:
                break
            version = self.history.get(version.parents[0])
        return False

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
