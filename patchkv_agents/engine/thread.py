"""A thread: one conversation of an agent, its history, and its KV state."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.context import (
    ContextHistory,
    ContextVersion,
    Conversation,
    Edit,
    FrozenJson,
    Message,
    SampledReply,
    ThreadKey,
    parse_messages,
    parse_template_args,
    parse_tools,
    render,
)
from patchkv_agents.engine.calls import Prefilled, Progress, Request, ThreadHost, render_checked
from patchkv_agents.engine.decoder import AnswerDecoder
from patchkv_agents.engine.generation import (
    SamplingOptions,
    SamplingParams,
    sampling_params,
)
from patchkv_agents.engine.observers import CallObservers
from patchkv_agents.engine.reply import Reply, StreamChunk
from patchkv_agents.engine.runtime import ModelRuntime
from patchkv_agents.engine.sampler import Sampler
from patchkv_agents.engine.sequence import KVSequence, Packing
from patchkv_agents.engine.stopwatch import Stopwatch
from patchkv_agents.engine.thread_state import ThreadState
from patchkv_agents.errors import PatchKVError
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.report import RecoveryReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Unpack

    from patchkv_agents.context.versioning.views import Ref

MAX_OMITTED = 32
"""Fields that a report names of those which the chat template does not show."""


class Thread:
    """One conversation. Made by `Engine.thread`; its calls may not overlap.

    Args:
        key: names it.
        runtime: the model.
        state: history and KV state.
        host: the pool of threads.
        observers: notified of each call.
        packing: how `suspend` stores unless it is told.
    """

    def __init__(
        self,
        key: ThreadKey,
        runtime: ModelRuntime,
        state: ThreadState,
        *,
        host: ThreadHost[Thread],
        observers: CallObservers,
        packing: Packing,
    ) -> None:
        self.id = key.thread
        self.namespace = key.namespace
        self._key = key
        self._runtime = runtime
        self._state = state
        self._host = host
        self._observers = observers
        self._packing = packing
        self._busy = threading.Lock()  # a call is under way
        self._upkeep = threading.Lock()  # the pool is storing state; calls wait for that
        self._used_s = time.monotonic()

    @property
    def key(self) -> ThreadKey:
        """Thread id and namespace."""
        return self._key

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self._runtime.tokenizer

    @property
    def history(self) -> ContextHistory:
        """The versions of its context."""
        return self._state.history

    @property
    def sequence(self) -> KVSequence:
        """Tokens and KV state below the messages."""
        return self._state.sequence

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way."""
        return self._busy.locked()

    @property
    def used_s(self) -> float:
        """When a call ended last, of `time.monotonic`."""
        return self._used_s

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
        watch = Stopwatch(self._runtime.clock_ns, called_ns)
        watch.mark("wait")
        started_ns = time.time_ns() - int(watch.ms("wait") * 1e6)
        params = sampling_params(sampling)
        conversation = Conversation(parse_messages(messages), parse_tools(tools))
        arguments = parse_template_args(template_args)
        replies = self._state.replies
        rendered = render_checked(conversation, arguments, replies, self._runtime)
        watch.mark("render")
        request = Request(
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
            started_ns,
        )
        return self._answer(request)

    def base(self, messages: Sequence[Message]) -> ContextVersion | None:
        """The version that a context will be taken to go on from; None for the first one.

        Which is the one answered last, unless the messages are those of an earlier one, and an
        answer to it that was not followed before.
        """
        return self._state.base(messages)

    def suspend(self, packing: Packing | None = None) -> None:
        """Store the KV state in CPU memory and free the cache, as while a tool runs.

        Rows are stored losslessly as long as the engine's memory budget has room for them. The work
        goes on in the background, and so does saving to the engine's store; the next call waits
        for the former.

        Args:
            packing: `"now"` stores in the formats of the last call's policy at once, whatever room
                there is; the engine's choice if left out.
        """
        with self._exclusive():
            self._state.suspend(packing or self._packing)

    def suspend_if_idle(self, packing: Packing | None = None) -> bool:
        """Suspend the thread unless a call is under way; calls that begin meanwhile wait.

        Returns:
            Whether it is suspended now.
        """
        if self._busy.locked() or not self._upkeep.acquire(blocking=False):
            return False
        try:
            if self._busy.locked():
                return False
            self._state.suspend(packing or self._packing)
            return True
        finally:
            self._upkeep.release()

    def fork(self, thread_id: str, *, storage: PrecisionPolicy | None = None) -> Thread:
        """A new thread at the same version that shares the stored state. Suspends this one.

        Args:
            thread_id: of the new thread.
            storage: the formats in which its further rows are packed; this thread's if left out.
        """
        with self._exclusive():
            self._state.suspend(self._packing)
            return self._host.fork(self, thread_id, storage)

    def become_fork(self, source: Thread, history: ContextHistory, sequence: KVSequence) -> None:
        """Take over copies of another thread's history and state. For the pool."""
        self._state.take_over(source._state, history, sequence)

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
            self._runtime.tokenizer,
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
        with self._exclusive_if_idle() as is_idle:
            if is_idle:
                self._state.clear()

    def clear_for(self, forgetting: str) -> None:
        """As `clear`, once for each version of another thread that says to forget.

        Args:
            forgetting: that version's id.

        Raises:
            CheckpointError: the store cannot delete; tried again at the next call.
        """
        with self._exclusive_if_idle() as is_idle:
            if is_idle:
                self._state.clear_for(forgetting)
            else:
                self._state.must_clear = True

    def _answer(self, request: Request) -> Iterator[StreamChunk]:
        with self._host.keeping_within_memory(), self._exclusive(), self._observers.answering():
            progress = Progress()
            try:
                request = request.renewed(self._state.replies, self._runtime)
                progress.version, progress.edits = self._state.place(
                    request.conversation,
                    request.template_args,
                    edits=request.edits,
                    parent=request.parent,
                    checkpoint_id=request.checkpoint_id,
                )
                request.watch.mark("history")
                progress.prefilled = self._prefill(progress.version, request)
                for chunk in self._decode(progress, progress.prefilled, request.params):
                    progress.reply = chunk.reply
                    yield chunk
            except GeneratorExit:  # closed by the caller
                raise
            except BaseException as error:
                progress.error = error
                raise
            finally:
                self._used_s = time.monotonic()
                outcome = progress.outcome(
                    thread=self._key,
                    model=self._runtime.name,
                    history=self.history,
                    params=request.params,
                    started_ns=request.started_ns,
                    ended_ns=time.time_ns(),
                )
                self._observers.notify(outcome, request.rendered.token_ids)

    def _prefill(self, version: ContextVersion, request: Request) -> Prefilled:
        """Recover the state of a version, and choose the first token."""
        rendered, watch, runtime = request.rendered, request.watch, self._runtime
        token_ids = rendered.token_ids
        policy, reasons = request.safe_policy(self._host.policy, runtime.support.verdict)
        model = runtime.adapter.model
        sampler = Sampler(
            request.params, token_ids.tolist(), model.generation_config, runtime.adapter.device
        )
        reasons += self._state.forget(version, token_ids, partial(self._host.clear_forks, self))
        if any(edit.forget for edit in version.edits):
            self._observers.forget()
        reasons += self._state.fetch(version)
        watch.mark("fetch")
        resumed = self.sequence.resume(
            token_ids,
            policy,
            room=min(request.params.max_new_tokens, runtime.max_tokens - len(token_ids)),
            version=version.id,
            anchors_of=partial(self._state.anchors, version, rendered.message_spans),
            own_of=self._state.own_rows(version),
            watch=watch,
        )
        self._state.note(version, rendered.message_spans, resumed)
        token = sampler(resumed.logits)
        watch.mark("sampling")
        if resumed.trouble:
            reasons.append(resumed.trouble)
        report = RecoveryReport.of_plan(
            resumed.plan,
            policy=policy.name,
            fallback_reason="; ".join(reasons) or None,
            resumed_from=resumed.resumed_from,
            restored_formats=resumed.restored_formats,
            payload_bytes=resumed.payload_bytes,
            omitted=rendered.omitted[:MAX_OMITTED],
            notes=rendered.notes,
            **watch.report(),
        )
        return Prefilled(resumed, report, sampler, token)

    def _decode(
        self, progress: Progress, prefilled: Prefilled, params: SamplingParams
    ) -> Iterator[StreamChunk]:
        runtime, report = self._runtime, prefilled.report
        limit = min(params.max_new_tokens, runtime.max_tokens - report.tokens)
        decoder = AnswerDecoder(
            runtime.tokenizer, runtime.end_tokens, params, prefilled.sampler, limit
        )
        try:
            yield from decoder.pieces(prefilled.first_token, self.sequence.append)
        finally:  # also what was said before the stream was closed
            self._state.add_reply(SampledReply.of(decoder.token_ids, runtime.tokenizer))
        last = decoder.finish()
        if progress.version is None:
            raise RuntimeError("an answer needs a version")
        reply = prefilled.reply(progress.version.id, progress.edits, decoder, params)
        yield replace(last, reply=reply)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._exclusive_if_idle() as is_idle:
            if not is_idle:
                raise PatchKVError(
                    f"thread '{self.id}' is answering already: finish or close its stream first, "
                    "or use another thread"
                )
            yield

    @contextmanager
    def _exclusive_if_idle(self) -> Iterator[bool]:
        """Keeps calls and the pool out unless a call is under way; gives whether it does."""
        if not self._busy.acquire(blocking=False):
            yield False
            return
        try:
            with self._upkeep:
                yield True
        finally:
            self._busy.release()
