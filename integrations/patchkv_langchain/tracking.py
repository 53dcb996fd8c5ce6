"""Records what chat models are shown that keep no versions themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import register_configure_hook
from langchain_core.utils.function_calling import convert_to_openai_tool

from patchkv_agents.context import ContextVersion, Message, ThreadKey, from_langchain
from patchkv_agents.context.lineage.checkpoints import Search
from patchkv_agents.errors import ContextError
from patchkv_langchain.agent_threads import AgentThreads, agent_key, run_config
from patchkv_langchain.events import dispatch_reply
from patchkv_langchain.graph_steps import GraphStep
from patchkv_langchain.notes import ModelCall, current_call, serving
from patchkv_langgraph.checkpoints import aasking, asking
from patchkv_langgraph.notices import warn
from patchkv_langgraph.recordable import recordable, without_repeated_ids

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage
    from langgraph.checkpoint.base import BaseCheckpointSaver

    from patchkv_langchain.notes import ServingThread


class Tracker:
    """Commits versions for a middleware, and for the agents that its tools run.

    Args:
        threads: of the middleware.
        on_error: what happens where something cannot be recorded.
    """

    def __init__(self, threads: AgentThreads, on_error: Literal["warn", "raise"]) -> None:
        self._threads = threads
        self._on_error = on_error
        self._has_warned_of_place = False

    @contextmanager
    def guarding(self, what: str) -> Iterator[None]:
        """Let nothing that goes wrong with recording `what` end the run."""
        try:
            yield
        except Exception as error:
            if self._on_error == "raise":
                raise
            warn(f"{what} are not recorded: {type(error).__name__}: {error}")

    @contextmanager
    def tracking(self, fallback: ThreadKey | None) -> Iterator[None]:
        """Record the calls of models within, as those of subagents that a tool runs.

        Args:
            fallback: the thread for calls without a thread id.
        """
        calls = _SubagentCalls(self, self._threads, fallback)
        token = _subagent_calls.set(calls)
        try:
            with serving(calls.serve):
                yield
        finally:
            _subagent_calls.reset(token)

    def commit(
        self,
        key: ThreadKey,
        messages: Sequence[BaseMessage],
        tools: Sequence[Any],
        config: Mapping[str, Any],
    ) -> ContextVersion | None:
        """Make what a model is shown a version. Reads and writes the store.

        Args:
            key: of the agent.
            messages: of the call, the system message first.
            tools: in any form that LangChain knows.
            config: LangChain's configuration of the run.

        Returns:
            The version; None if there was one already, or it is not recorded.
        """
        version = None
        with self.guarding(f"the messages of {key}"):
            version = asking(*self._committing(key, messages, tools, config))
        return version

    async def acommit(
        self,
        key: ThreadKey,
        messages: Sequence[BaseMessage],
        tools: Sequence[Any],
        config: Mapping[str, Any],
    ) -> ContextVersion | None:
        """As `commit`, in asynchronous code: the store is used in another thread."""
        version = None
        with self.guarding(f"the messages of {key}"):
            committing = asyncio.to_thread(self._committing, key, messages, tools, config)
            version = await aasking(*await committing)
        return version

    def _committing(
        self,
        key: ThreadKey,
        messages: Sequence[BaseMessage],
        tools: Sequence[Any],
        config: Mapping[str, Any],
    ) -> tuple[Search[ContextVersion | None], BaseCheckpointSaver[Any] | None]:
        """What commits the messages, and the saver that it asks."""
        shown = self._values(key, messages)
        step = GraphStep.of(config)
        log = self._threads.log(key, shown, step)
        committing = log.commit(messages, shown, self._schemas(key, tools), step)
        return committing, None if step is None else step.saver

    def _values(self, key: ThreadKey, messages: Sequence[BaseMessage]) -> Sequence[Message]:
        """The messages as a history can store them."""
        try:
            return from_langchain(messages, keep="shown")
        except ContextError:
            if self._on_error == "raise":
                raise
        values, problems = zip(*map(recordable, messages), strict=True)
        shown, problem = without_repeated_ids(values)
        found = ", ".join(dict.fromkeys(each for each in (*problems, problem) if each))
        warn(f"the messages of {key} are recorded with replacements: {found}")
        return shown

    def check_place(self, expected: Sequence[BaseMessage], shown: Sequence[BaseMessage]) -> None:
        """Warn once where a middleware behind this one changes the messages."""
        same = len(expected) == len(shown) and all(
            before is after or before.content == after.content
            for before, after in zip(expected, shown, strict=True)
        )
        if not same and not self._has_warned_of_place:
            self._has_warned_of_place = True
            warn(
                "a middleware behind PatchKVMiddleware changes the messages, so its edits are "
                "recorded without an author: put PatchKVMiddleware last, or pass the others to "
                "create_agent(middleware=patchkv.instrument([...]))"
            )

    def _schemas(self, key: ThreadKey, tools: Sequence[Any]) -> list[dict[str, Any]]:
        schemas = []
        for tool in tools:
            with self.guarding(f"some of the tools of {key}"):  # one that has no schema
                schemas.append(convert_to_openai_tool(tool))
        return schemas


class _ShownMessages(BaseCallbackHandler):
    """Keeps the messages that a chat model is shown."""

    run_inline = True

    def __init__(self, call: ModelCall) -> None:
        self._call = call

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], **kwargs: Any
    ) -> None:
        if current_call() is self._call:  # else that of a middleware within
            self._call.shown = messages[0]


class _SubagentCalls(BaseCallbackHandler):
    """Records the calls of models that agents within tools make.

    LangChain runs it in a thread of its own where the call is asynchronous.
    """

    def __init__(self, tracker: Tracker, threads: AgentThreads, fallback: ThreadKey | None) -> None:
        self._tracker = tracker
        self._threads = threads
        self._fallback = fallback

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        parameters = kwargs.get("invocation_params") or {}
        # `ChatPatchKV` keeps its versions, and a subagent may have a middleware of its own.
        if parameters.get("_type") == "patchkv" or current_call() is not None:
            return
        if (metadata or {}).get("lc_source"):  # a summarizer, whose context is no agent's
            return
        config = run_config()
        key = self._key(config)
        if key is None:
            return
        tools = parameters.get("tools") or ()
        version = self._tracker.commit(key, messages[0], tools, config)
        if version is not None:
            dispatch_reply(None, version.edits, version.id)

    def serve(self, thread: ServingThread) -> None:
        """An engine's thread answers a subagent."""
        config = run_config()
        key = self._key(config)
        if key is not None:
            namespace = (config.get("configurable") or {}).get("checkpoint_ns")
            self._threads.of(key).serve(str(namespace or "").rpartition("|")[0], thread)

    def _key(self, config: Mapping[str, Any]) -> ThreadKey | None:
        """The agent that calls; None if it is no subagent, but the tool itself."""
        configurable = dict(config.get("configurable") or {})
        if configurable.get("thread_id") is None and self._fallback is not None:
            configurable["thread_id"] = self._fallback.thread
        key = agent_key(configurable, config.get("metadata") or {})
        if key is None or (self._fallback is not None and key == self._fallback):
            return None
        return key


_shown_messages: ContextVar[_ShownMessages | None] = ContextVar("patchkv_shown", default=None)
_subagent_calls: ContextVar[_SubagentCalls | None] = ContextVar("patchkv_subagents", default=None)
register_configure_hook(_shown_messages, inheritable=True)
register_configure_hook(_subagent_calls, inheritable=True)


@contextmanager
def showing(call: ModelCall) -> Iterator[None]:
    """Note in `call` which messages the chat model within is shown."""
    token = _shown_messages.set(_ShownMessages(call))
    try:
        yield
    finally:
        _shown_messages.reset(token)
