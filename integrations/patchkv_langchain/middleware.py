"""`PatchKVMiddleware`: tells the chat model who edited the context of an agent, and why."""

from __future__ import annotations

import asyncio
import logging
import uuid
import weakref
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

from langchain.agents.middleware import (
    AgentMiddleware,
    AgentState,
    ExtendedModelResponse,
    ModelRequest,
    ModelResponse,
)
from langchain.agents.middleware.types import PrivateStateAttr
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.graph.message import add_messages
from langgraph.types import Command
from typing_extensions import NotRequired

from patchkv_agents.context import ContextVersion, ThreadKey, from_langchain
from patchkv_agents.errors import PatchKVError
from patchkv_langchain.events import adispatch_reply, dispatch_reply
from patchkv_langchain.instrument import watched
from patchkv_langchain.notes import ModelCall, Note, Sign, model_call, sign
from patchkv_langchain.records import changes_between, declared_edits
from patchkv_langchain.threads import RUN, Threads, thread_key

if TYPE_CHECKING:
    from langchain.agents.middleware import ToolCallRequest
    from langchain_core.messages import ToolMessage

    from patchkv_agents.context import ContextHistory, HistoryStore

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

    Before each call of the model it compares the agent's state with the request and hands what it
    knows to `ChatPatchKV`, whose thread records the edits with kind and author. While tools run,
    that thread's KV state lies suspended in CPU memory. With any other chat model it keeps the
    versions itself, in `history`.

    Args:
        history: store for the versions of contexts that another chat model answers; in memory if
            left out. See `history_of`.
        suspend: whether to suspend the thread's KV state while tools run.
    """

    state_schema = PatchKVState

    def __init__(
        self,
        *,
        history: HistoryStore | None = None,
        suspend: bool = True,
    ) -> None:
        super().__init__()
        self.tools = []
        self._threads = Threads(history)
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
        """The versions of a thread, with the edits that led to each.

        Those that the chat model keeps (`ChatPatchKV`, as long as its engine has the thread), or
        those that this middleware has kept in its place.
        """
        return self._threads.history(ThreadKey(thread_id, namespace))

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Answer]
    ) -> Answer:
        """Note the edits for the chat model within; keep the version if it does not."""
        key, is_new = _named(request)
        notes = self._notes(request, key)
        with model_call(notes) as call:
            answer = handler(request)
            version = self._answered(request, key, call)
            if version is not None:
                dispatch_reply(None, version.edits, version.id)
        return _with_run(answer, key) if is_new else answer

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[Answer]]
    ) -> Answer:
        """As `wrap_model_call`."""
        key, is_new = _named(request)
        notes = self._notes(request, key)
        with model_call(notes) as call:
            answer = await handler(request)
            version = self._answered(request, key, call)
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
        return handler(request)

    async def awrap_tool_call(
        self,
        request: ToolCallRequest,
        handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]],
    ) -> ToolMessage | Command[Any]:
        """As `wrap_tool_call`."""
        await asyncio.to_thread(self._suspend, request)
        return await handler(request)

    def _notes(self, request: ModelRequest[Any], key: ThreadKey) -> tuple[Note, ...]:
        """What is known of the edits of a request."""
        known = self._threads.of(key)
        notes = changes_between(request.state["messages"], request.messages, where="request")
        author, known.system_author = known.system_author, None
        if author is not None:
            system = frozenset([_system_sign(request)])
            known.note([Note(frozenset(), system, author, where="request")])
        # The last one counts: what single middlewares did says more than both ends.
        return (*notes, *known.notes)

    def _answered(
        self, request: ModelRequest[Any], key: ThreadKey, call: ModelCall
    ) -> ContextVersion | None:
        """Remember who answered. The version, if that was a model which keeps none."""
        if call.thread is not None:
            self._threads.of(key).serving = weakref.ref(call.thread)
            return None
        messages: list[BaseMessage] = list(request.messages)
        if request.system_message is not None:
            messages.insert(0, request.system_message)
        history = self._threads.history(key)
        before = history.head
        try:
            shown = from_langchain(messages, keep="shown")
            version = history.commit(
                shown,
                tools=[convert_to_openai_tool(tool) for tool in request.tools],
                edits=declared_edits(before.messages if before else (), messages, shown=shown),
            )
        except (PatchKVError, TypeError, ValueError) as error:  # a tool that has no schema
            _LOG.warning("the context of thread %s is not tracked: %s", key, error)
            return None
        return version if before is None or version.id != before.id else None

    def _suspend(self, request: ToolCallRequest) -> None:
        key = thread_key(request.runtime, request.state)
        if not self._suspends or key is None:
            return
        serving = self._threads.of(key).serving
        thread = serving() if serving is not None else None
        if thread is None:
            return
        try:
            thread.suspend()
        except PatchKVError as error:  # it answers somebody else just now
            _LOG.debug("thread %s stays where it is: %s", key, error)

    def _on_update(self, name: str, state: Any, update: Any, runtime: Any) -> None:
        """A hook of another middleware has returned an update of the state."""
        key = thread_key(runtime, state)
        fields = update.update if isinstance(update, Command) else update
        if key is None or not isinstance(fields, dict) or not fields.get("messages"):
            return
        before = state["messages"]
        try:
            after: Any = add_messages(before, _copied(fields["messages"]))
        except ValueError:  # the agent's own reducer will say so
            return
        self._threads.of(key).note(changes_between(before, after, author=name))

    def _on_request(self, name: str, before: ModelRequest[Any], after: ModelRequest[Any]) -> None:
        """Another middleware has passed on a request."""
        key = thread_key(after.runtime, after.state)
        if key is not None:
            known = self._threads.of(key)
            known.note_system(name, _system_sign(before), _system_sign(after))
            known.note(
                changes_between(before.messages, after.messages, author=name, where="request")
            )


def _named(request: ModelRequest[Any]) -> tuple[ThreadKey, bool]:
    """The thread of a request, and whether it is a run that was given its name just now."""
    key = thread_key(request.runtime, request.state)
    if key is not None:
        return key, False
    named = thread_key(request.runtime, {RUN: f"run-{uuid.uuid4()}"})
    return named or ThreadKey("run"), True


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
