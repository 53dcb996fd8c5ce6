"""Wraps nodes so that what they do to the messages is recorded."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, overload

from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langgraph.errors import ParentCommand
from langgraph.graph.message import add_messages

from patchkv_agents.context import Edit, EditKind, Message
from patchkv_agents.errors import InputError
from patchkv_langgraph.history import GraphHistory
from patchkv_langgraph.line import Line
from patchkv_langgraph.marks import edit_kind, marked_edits
from patchkv_langgraph.signatures import with_keyword
from patchkv_langgraph.tasks import NodeTask, Reducer, message_updates, messages_in, state_read

Node = TypeVar("Node", bound=Callable[..., Any] | Runnable[Any, Any])


@overload
def track_edits(
    node: Node,
    *,
    history: GraphHistory,
    messages_key: str = ...,
    author: str | None = ...,
    kind: EditKind | str | None = ...,
    reducer: Reducer = ...,
) -> Node: ...


@overload
def track_edits(
    node: None = None,
    *,
    history: GraphHistory,
    messages_key: str = ...,
    author: str | None = ...,
    kind: EditKind | str | None = ...,
    reducer: Reducer = ...,
) -> Callable[[Node], Node]: ...


def track_edits(
    node: Any = None,
    *,
    history: GraphHistory,
    messages_key: str = "messages",
    author: str | None = None,
    kind: EditKind | str | None = None,
    reducer: Reducer = add_messages,
) -> Any:
    """Record what a node does to the messages of the state.

    Used as `builder.add_node("refresh", track_edits(refresh, history=history))`, or as a decorator
    with `@track_edits(history=history)`. The node's parameters and annotations stay what LangGraph
    sees; what it returns is passed on as it is.

    If the node changes messages, the messages that it was given and those that its update leads to
    become versions, and what lies between them becomes edits under the node's name. A node that
    raises, as one does that interrupts the graph, is recorded when it is through; outside of a
    graph, and with a result that says nothing of the messages, nothing is recorded.

    Args:
        node: a function, method, coroutine or generator function, object with `__call__`, or
            Runnable (a subgraph, a `ToolNode`).
        history: where versions go.
        messages_key: the messages' key in the state.
        author: name for the edits; the node's name in the graph if left out.
        kind: what the node does to messages that were there before, such as
            `EditKind.REFRESH_EVIDENCE`; inferred if left out.
        reducer: the one of the messages' key in the state.

    Raises:
        InputError: it is no node.
        ContextError: there is no such kind; while running: the run has no thread id, or a message
            cannot be kept.
    """
    if node is None:
        return partial(
            track_edits,
            history=history,
            messages_key=messages_key,
            author=author,
            kind=kind,
            reducer=reducer,
        )
    if inspect.isgeneratorfunction(node) or inspect.isasyncgenfunction(node):
        node = RunnableLambda(node)  # as LangGraph does: what it yields is added up
    known = None if kind is None else edit_kind(kind)
    tracker = _Tracker(history, messages_key, author, known, reducer)
    if isinstance(node, Runnable):
        return _tracked_runnable(node, tracker)
    if not callable(node):
        raise InputError(f"{node!r} is no node: pass a function, a Runnable or a callable object.")
    return _tracked_function(node, tracker)


@dataclass(frozen=True, slots=True)
class _Tracker:
    """How one node is tracked."""

    history: GraphHistory
    messages_key: str
    author: str | None
    kind: EditKind | None
    reducer: Reducer

    def begin(self, state: Any, config: RunnableConfig | None) -> _Recording | None:
        """Note what the node starts from; None if there is nothing to record it for."""
        task = NodeTask.of(config)
        if task is None:
            return None
        line = self.history.line(task)
        context = state
        if task.is_sent:  # of what is sent, only a ToolNode's input has the graph's state
            is_call = isinstance(state, Mapping) and state.get("__type") == "tool_call_with_context"
            context = state["state"] if is_call else {}
        messages = messages_in(context, self.messages_key)
        if messages is None:
            # A node whose schema leaves them out, one that was sent something else, or a state that
            # has none yet.
            found = state_read(config, self.messages_key)
            messages = messages_in(found, self.messages_key) or ([] if not task.is_sent else None)
        before = () if messages is None else line.begin(messages)
        return _Recording(self, task, line, messages, before)

    def declare(
        self, author: str, old: Sequence[Message], new: Sequence[Message], *lists: list[Any]
    ) -> Iterable[Edit]:
        """The edits that marks and the node's kind tell of."""
        edits = list(marked_edits(*lists, author=author))
        told = {name for edit in edits for name in edit.message_ids}
        if self.kind is None:
            return edits
        before = {message.id: message for message in old if message.id is not None}
        after = {message.id: message for message in new if message.id is not None}
        changed = [
            name
            for name, message in before.items()
            if name not in told
            and (name not in after or after[name].content_hash != message.content_hash)
        ]
        if self.kind is EditKind.SUMMARIZE and changed:
            came = [name for name in after if name not in before]
            edits.append(Edit.declare(self.kind, message_ids=(*changed, *came), author=author))
        else:
            edits += (
                Edit.declare(self.kind, message_ids=(name,), author=author) for name in changed
            )
        return edits


@dataclass(frozen=True, slots=True)
class _Recording:
    """One execution of a tracked node."""

    tracker: _Tracker
    task: NodeTask
    line: Line
    messages: list[Any] | None
    before: tuple[Message, ...]

    def finish(self, result: Any) -> None:
        """Record what the node did, going by what it returned."""
        tracker = self.tracker
        updates = list(message_updates(result, tracker.messages_key, scope=self.task.scope))
        if not updates:
            return
        author = tracker.author or self.task.node
        self.line.finish(
            self.task,
            self.messages,
            self.before,
            updates,
            reducer=tracker.reducer,
            declare=partial(tracker.declare, author),
            author=author,
        )

    def hand_over(self, error: ParentCommand) -> None:
        """Record what a subgraph in the node did to this graph's state by a command."""
        command = error.args[0]
        if command.graph == self.task.scope:
            self.finish(command)


def _tracked_runnable(node: Runnable[Any, Any], tracker: _Tracker) -> Runnable[Any, Any]:
    def run(state: Any, config: RunnableConfig) -> Any:
        return _recorded(tracker, state, config, lambda: node.invoke(state, config))

    async def arun(state: Any, config: RunnableConfig) -> Any:
        return await _arecorded(tracker, state, config, lambda: node.ainvoke(state, config))

    return RunnableLambda(run, afunc=arun, name=node.get_name())


def _tracked_function(node: Callable[..., Any], tracker: _Tracker) -> Callable[..., Any]:
    is_plain = inspect.isroutine(node) or isinstance(node, partial)
    call: Callable[..., Any] = node if is_plain else type(node).__call__.__get__(node)
    signature = inspect.signature(call)
    accepts_config = "config" in signature.parameters
    # Of a function that becomes a method, the first argument is the object.
    place = 1 if next(iter(signature.parameters), "") in ("self", "cls") else 0
    record = _arecorded if inspect.iscoroutinefunction(call) else _recorded

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        config = kwargs.get("config")
        if not accepts_config:
            kwargs = {key: value for key, value in kwargs.items() if key != "config"}
        state = args[place] if len(args) > place else next(iter(kwargs.values()), None)
        return record(tracker, state, config, lambda: call(*args, **kwargs))

    if inspect.iscoroutinefunction(call):

        @wraps(call)
        async def atracked(*args: Any, **kwargs: Any) -> Any:
            return await run(args, kwargs)

        tracked: Callable[..., Any] = atracked
    else:

        @wraps(call)
        def plain(*args: Any, **kwargs: Any) -> Any:
            return run(args, kwargs)

        tracked = plain

    if not is_plain:
        tracked.__name__ = type(node).__name__
    if not accepts_config:
        tracked.__signature__ = with_keyword(  # type: ignore[attr-defined]
            signature, "config", RunnableConfig
        )
    return tracked


def _recorded(
    tracker: _Tracker, state: Any, config: RunnableConfig | None, call: Callable[[], Any]
) -> Any:
    """What `call` returns, recorded."""
    recording = tracker.begin(state, config)
    if recording is None:
        return call()
    try:
        result = call()
    except ParentCommand as error:
        recording.hand_over(error)
        raise
    recording.finish(result)
    return result


async def _arecorded(
    tracker: _Tracker, state: Any, config: RunnableConfig | None, call: Callable[[], Any]
) -> Any:
    """As `_recorded`; the store is written in another thread."""
    recording = tracker.begin(state, config)
    if recording is None:
        return await call()
    try:
        result = await call()
    except ParentCommand as error:
        await asyncio.to_thread(recording.hand_over, error)
        raise
    await asyncio.to_thread(recording.finish, result)
    return result
