"""`PatchKVMiddleware`: tells the chat model who edited the context of an agent, and why."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from langchain.agents.middleware import (
    AgentMiddleware,
    AgentState,
    ExtendedModelResponse,
    ModelRequest,
    ModelResponse,
)
from langchain.agents.middleware.types import PrivateStateAttr
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langgraph.graph.message import add_messages
from langgraph.types import Command
from typing_extensions import NotRequired

from patchkv_agents.context import ContextHistory, ThreadKey, from_langchain
from patchkv_agents.errors import InputError, PatchKVError
from patchkv_langchain.agent_threads import RUN, AgentThreads, run_config, runtime_key
from patchkv_langchain.events import adispatch_reply, dispatch_reply
from patchkv_langchain.instrument import watched
from patchkv_langchain.notes import ModelCall, Note, Sign, model_call, sign
from patchkv_langchain.records import changes_between
from patchkv_langchain.tracking import Tracker, showing

if TYPE_CHECKING:
    from langchain.agents.middleware import ToolCallRequest
    from langchain_core.messages import ToolMessage

    from patchkv_agents.context import HistoryStore

_LOG = logging.getLogger(__name__)

Answer = ModelResponse[Any] | AIMessage | ExtendedModelResponse[Any]


class PatchKVState(AgentState[Any]):
    """The agent's state, with the name of a run that has no thread id."""

    patchkv_run: NotRequired[Annotated[str, PrivateStateAttr]]


class PatchKVMiddleware(AgentMiddleware[PatchKVState, Any, Any]):
    """Tracks the edits that other middleware makes to an agent's context.

    Put it last in the list, or let `instrument` do so, which also learns the names of the others::

        patchkv = PatchKVMiddleware()
        agent = create_agent(
            ChatPatchKV(model="smollm2"),
            tools=[...],
            middleware=patchkv.instrument([ContextEditingMiddleware(), TodoListMiddleware()]),
        )

    Before each call of the model it compares the agent's state with the request and passes what it
    knows to `ChatPatchKV`, whose thread records the edits with kind and author. While tools run,
    that thread's KV state lies suspended in CPU memory. With any other chat model it keeps the
    versions itself, in `history`; so it does for the agents that tools run, such as the subagents
    of deepagents, which need no middleware of their own.

    Args:
        history: SQLite file or store for the versions of contexts that another chat model answers;
            in memory if left out. A file is opened at its first use. See `history_of`.
        suspend: whether to suspend the thread's KV state while tools run.
        on_error: what happens where something cannot be recorded. `"warn"`: the agent goes on, and
            a warning says what is missing; `"raise"`: the error goes out.

    Raises:
        InputError: an argument is of the wrong kind.
    """

    state_schema = PatchKVState

    def __init__(
        self,
        *,
        history: HistoryStore | str | Path | None = None,
        suspend: bool = True,
        on_error: Literal["warn", "raise"] = "warn",
    ) -> None:
        super().__init__()
        if history is not None and not isinstance(history, str | Path):
            if not hasattr(history, "version_ids"):
                raise InputError(f"history is {history!r}: give a file, a HistoryStore or None")
        elif str(history) == ":memory:":
            raise InputError("leave history out to keep the versions in memory")
        if on_error not in ("warn", "raise"):
            raise InputError(f"on_error is {on_error!r}: use 'warn' or 'raise'")
        self.tools = []
        self._threads = AgentThreads(history)
        self._tracker = Tracker(self._threads, on_error)
        self._suspends = suspend

    def instrument(
        self, middleware: Iterable[AgentMiddleware[Any, Any, Any]]
    ) -> list[AgentMiddleware[Any, Any, Any]]:
        """The list to give to `create_agent`: `middleware`, watched, and this one behind it.

        What is passed in is left as it is; the agent gets shallow copies of the same classes and
        names, and does the same with them.
        """
        others = [watched(each, self._on_update, self._on_request) for each in middleware]
        return [*others, self]

    def history_of(self, thread_id: str, namespace: str = "") -> ContextHistory:
        """The versions of an agent in a thread, with the edits that led to each.

        Those that the chat model keeps (`ChatPatchKV`, as long as its engine has the thread), or
        those that this middleware keeps in its place.

        Args:
            thread_id: LangGraph's, or one of `threads` for a run without an id.
            namespace: the agent's path in the graph (see `threads`); empty for an agent that is the
                graph itself.
        """
        return self._threads.history(ThreadKey(thread_id, namespace))

    def threads(self) -> tuple[ThreadKey, ...]:
        """The conversations that were tracked, the newest last: thread id and namespace of each.

        A namespace is the path of the agent's node in the graphs around, such as `tools/researcher`
        for a subagent that a tool runs; `#2` and so on are further conversations of the same agent.
        """
        return self._threads.keys()

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Answer]
    ) -> Answer:
        """Note the edits for the chat model within; keep the version if it does not."""
        key, is_new = _named(request)
        with model_call(self._notes(request, key)) as call, showing(call):
            answer = handler(request)
            version = None
            if not self._is_served(request, key, call):
                messages = self._shown(request, call)
                version = self._tracker.commit(key, messages, request.tools, run_config())
            if version is not None:
                dispatch_reply(None, version.edits, version.id)
        return _with_run(answer, key) if is_new else answer

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[Answer]]
    ) -> Answer:
        """As `wrap_model_call`."""
        key, is_new = _named(request)
        with model_call(self._notes(request, key)) as call, showing(call):
            answer = await handler(request)
            version = None
            if not self._is_served(request, key, call):
                messages = self._shown(request, call)
                version = await self._tracker.acommit(key, messages, request.tools, run_config())
            if version is not None:
                await adispatch_reply(None, version.edits, version.id)
        return _with_run(answer, key) if is_new else answer

    def wrap_tool_call(
        self,
        request: ToolCallRequest,
        handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]],
    ) -> ToolMessage | Command[Any]:
        """Suspend the thread's KV state and run the tool. The next call of the model resumes."""
        self._suspend(request)
        with self._tracker.tracking(runtime_key(request.runtime, request.state)):
            return handler(request)

    async def awrap_tool_call(
        self,
        request: ToolCallRequest,
        handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]],
    ) -> ToolMessage | Command[Any]:
        """As `wrap_tool_call`."""
        await asyncio.to_thread(self._suspend, request)
        with self._tracker.tracking(runtime_key(request.runtime, request.state)):
            return await handler(request)

    def _notes(self, request: ModelRequest[Any], key: ThreadKey) -> tuple[Note, ...]:
        """Notes on the edits of a request."""
        agent = self._threads.of(key)
        notes: tuple[Note, ...] = ()
        with self._tracker.guarding("edits of a request"):
            notes = changes_between(request.state["messages"], request.messages, where="request")
            author = agent.take_system_author()
            if author is not None:
                system = frozenset([_system_sign(request)])
                agent.note([Note(frozenset(), system, author, where="request")])
        # The last one counts: what single middlewares did says more than both ends.
        return (*notes, *agent.notes)

    def _is_served(self, request: ModelRequest[Any], key: ThreadKey, call: ModelCall) -> bool:
        """Whether a thread of an engine has answered, which keeps the versions; remember it."""
        if call.thread is None:
            return False
        self._shown(request, call)
        self._threads.of(key).serve(_run_of(request.runtime), call.thread)
        return True

    def _shown(self, request: ModelRequest[Any], call: ModelCall) -> list[BaseMessage]:
        """The messages that the model was shown."""
        messages: list[BaseMessage] = list(request.messages)
        if request.system_message is not None:
            messages.insert(0, request.system_message)
        if call.shown is None:
            return messages
        self._tracker.check_place(messages, call.shown)
        return list(call.shown)

    def _suspend(self, request: ToolCallRequest) -> None:
        key = runtime_key(request.runtime, request.state)
        if not self._suspends or key is None:
            return
        thread = self._threads.of(key).serving(_run_of(request.runtime))
        if thread is None:
            return
        try:
            thread.suspend()
        except PatchKVError as error:  # it answers somebody else just now
            _LOG.debug("thread %s stays where it is: %s", key, error)

    def _on_update(self, name: str, state: Any, update: Any, runtime: Any) -> None:
        """A hook of another middleware has returned an update of the state."""
        key = runtime_key(runtime, state)
        fields = update.update if isinstance(update, Command) else update
        if key is None or not isinstance(fields, dict) or not fields.get("messages"):
            return
        before = state["messages"]
        with self._tracker.guarding(f"edits by {name}"):
            try:
                after: Any = add_messages(before, _copied(fields["messages"]))
            except ValueError:  # the agent's own reducer will say so
                return
            self._threads.of(key).note(changes_between(before, after, author=name))

    def _on_request(self, name: str, before: ModelRequest[Any], after: ModelRequest[Any]) -> None:
        """Another middleware has passed on a request."""
        key = runtime_key(after.runtime, after.state)
        if key is None:
            return
        with self._tracker.guarding(f"edits by {name}"):
            agent = self._threads.of(key)
            agent.note_system(name, _system_sign(before), _system_sign(after))
            agent.note(
                changes_between(before.messages, after.messages, author=name, where="request")
            )


def _named(request: ModelRequest[Any]) -> tuple[ThreadKey, bool]:
    """The thread of a request, and whether it is a run that was given its name just now."""
    key = runtime_key(request.runtime, request.state)
    if key is not None:
        return key, False
    named = runtime_key(request.runtime, {RUN: f"run-{uuid.uuid4()}"})
    return named or ThreadKey("run"), True


def _run_of(runtime: Any) -> str:
    """What all calls of one run of an agent have in common, and no other run beside it."""
    info = getattr(runtime, "execution_info", None)
    return str(getattr(info, "checkpoint_ns", None) or "").rpartition("|")[0]


def _with_run(answer: Answer, key: ThreadKey) -> ExtendedModelResponse[Any]:
    """The answer, and the name of the run for the agent's state."""
    command: Command[Any] = Command(update={RUN: key.thread})
    if isinstance(answer, AIMessage):
        answer = ModelResponse(result=[answer])
    if isinstance(answer, ExtendedModelResponse):
        raise TypeError("PatchKVMiddleware must be the last in the list of middleware")
    return ExtendedModelResponse(answer, command)


def _system_sign(request: ModelRequest[Any]) -> Sign:
    message = request.system_message
    if message is None:
        return ("", "")
    return sign(from_langchain([message], keep="shown")[0])


def _copied(messages: Any) -> Any:
    """Messages of an update, which `add_messages` may give ids."""
    items = messages if isinstance(messages, list) else [messages]
    return [
        each.model_copy() if isinstance(each, BaseMessage) else convert_to_messages([each])[0]
        for each in items
    ]
