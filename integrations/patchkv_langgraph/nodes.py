"""Wraps nodes so that what they do to the context is recorded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, Literal, TypeVar, overload

from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.errors import ParentCommand

from patchkv_agents.context import EditKind
from patchkv_agents.errors import InputError
from patchkv_langgraph.history import MESSAGES, GraphHistory
from patchkv_langgraph.marks import edit_kind
from patchkv_langgraph.parts import ContextPart, Renderer, StatePart, default_kind
from patchkv_langgraph.signatures import with_keyword
from patchkv_langgraph.tasks import Reducer
from patchkv_langgraph.tracking import Tracker

Node = TypeVar("Node", bound=Callable[..., Any] | Runnable[Any, Any])
Contexts = Mapping[str, StatePart | Renderer | None]
OnError = Literal["warn", "raise"]


@overload
def track_edits(
    node: Node,
    *,
    history: GraphHistory,
    messages_key: str = ...,
    contexts: Contexts | None = ...,
    author: str | None = ...,
    kind: EditKind | str | None = ...,
    reducer: Reducer | None = ...,
    on_error: OnError = ...,
) -> Node: ...


@overload
def track_edits(
    node: None = None,
    *,
    history: GraphHistory,
    messages_key: str = ...,
    contexts: Contexts | None = ...,
    author: str | None = ...,
    kind: EditKind | str | None = ...,
    reducer: Reducer | None = ...,
    on_error: OnError = ...,
) -> Callable[[Node], Node]: ...


def track_edits(
    node: Any = None,
    *,
    history: GraphHistory,
    messages_key: str = MESSAGES,
    contexts: Contexts | None = None,
    author: str | None = None,
    kind: EditKind | str | None = None,
    reducer: Reducer | None = None,
    on_error: OnError = "warn",
) -> Any:
    """Record what a node does to the context in the state.

    Used as `builder.add_node("refresh", track_edits(refresh, history=history))`, or as a decorator
    with `@track_edits(history=history)`. The node's parameters and annotations stay what LangGraph
    sees; what it returns is passed on as it is.

    If the node changes messages, the messages that it was given and those that its update leads to
    become versions, and what lies between them becomes edits under the node's name. A node that
    raises, as one does that interrupts the graph, is recorded when it is through; outside of a
    graph, and with a result that says nothing of the messages, nothing is recorded. How updates are
    merged is read from the graph's schema.

    Args:
        node: a function, method, coroutine or generator function, object with `__call__`, or
            Runnable (a subgraph, a `ToolNode`).
        history: where versions go.
        messages_key: the messages' key in the state.
        contexts: the keys of the state that are recorded, where it is more than the messages. Each
            has a history of its own (`history.open(thread, key="plan")`). The value is None for
            what usually fits: the key `messages_key` holds messages, others are rendered as text or
            JSON; else a function that renders the value, or a `StatePart`.
        author: name for the edits; the node's name in the graph if left out.
        kind: what the node does to messages that were there before, such as
            `EditKind.REFRESH_EVIDENCE`; inferred if left out.
        reducer: merges the messages where LangGraph does not show how the graph does.
        on_error: what happens where something cannot be recorded. `"warn"`: the node's result is
            returned as it is, what can be recorded is, and one warning says what could not.
            `"raise"`: the error goes out of the node.

    Raises:
        InputError: it is no node, or is of the functional API, which has no state to track.
        ContextError: there is no such kind.
    """
    if on_error not in ("warn", "raise"):
        raise InputError(f"on_error is {on_error!r}; it must be 'warn' or 'raise'.")
    if not isinstance(history, GraphHistory):
        raise InputError(f"history is {history!r}; it must be a GraphHistory.")
    if contexts is not None and not (isinstance(contexts, Mapping) and contexts):
        raise InputError(f"contexts is {contexts!r}; it must map keys of the state to their parts.")
    if node is None:
        return partial(
            track_edits,
            history=history,
            messages_key=messages_key,
            contexts=contexts,
            author=author,
            kind=kind,
            reducer=reducer,
            on_error=on_error,
        )
    if type(node).__module__.startswith("langgraph.func") or _is_entrypoint(node):
        raise InputError(
            f"{node!r} is of LangGraph's functional API: its results are no updates of a state. "
            "Track nodes of a StateGraph, or commit to a ContextHistory in the task."
        )
    if inspect.isgeneratorfunction(node) or inspect.isasyncgenfunction(node):
        node = RunnableLambda(node)  # as LangGraph does: what it yields is added up
    parts = _parts({messages_key: None} if contexts is None else contexts, messages_key, kind)
    tracker = Tracker(history, parts, author, reducer, on_error)
    history.is_tracked = True
    if isinstance(node, Runnable):
        return _tracked_runnable(node, tracker)
    if not callable(node):
        raise InputError(f"{node!r} is no node: pass a function, a Runnable or a callable object.")
    return _tracked_function(node, tracker)


def _parts(
    contexts: Contexts, messages_key: str, kind: EditKind | str | None
) -> tuple[ContextPart, ...]:
    """The keys that are recorded, each with how and as what."""
    messages_kind = None if kind is None else edit_kind(kind)
    parts = []
    for key, how in contexts.items():
        if how is None:
            how = None if key == messages_key else StatePart()
        elif not isinstance(how, StatePart):
            if not callable(how):
                raise InputError(
                    f"contexts[{key!r}] is {how!r}; it must be None, a function that renders the "
                    "value, or a StatePart."
                )
            how = StatePart(how)
        if how is None:
            parts.append(ContextPart(key, None, messages_kind))
        else:
            part_kind = default_kind(key) if how.kind is None else edit_kind(how.kind)
            parts.append(ContextPart(key, how, part_kind))
    return tuple(parts)


def _is_entrypoint(node: Any) -> bool:
    """Whether it is what `@entrypoint` makes: a graph of one node without a state."""
    return "__previous__" in getattr(node, "channels", ()) and hasattr(node, "nodes")


def _tracked_runnable(node: Runnable[Any, Any], tracker: Tracker) -> Runnable[Any, Any]:
    def run(state: Any, config: RunnableConfig) -> Any:
        return _recorded(tracker, state, config, lambda: node.invoke(state, config))

    async def arun(state: Any, config: RunnableConfig) -> Any:
        return await _arecorded(tracker, state, config, lambda: node.ainvoke(state, config))

    return RunnableLambda(run, afunc=arun, name=node.get_name())


def _tracked_function(node: Callable[..., Any], tracker: Tracker) -> Callable[..., Any]:
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
        elif not isinstance(config, Mapping) or "configurable" not in config:
            # A parameter of the node's own: LangGraph fills in those with its annotations only.
            config = var_child_runnable_config.get()
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
    tracker: Tracker, state: Any, config: RunnableConfig | None, call: Callable[[], Any]
) -> Any:
    """What `call` returns, recorded."""
    recording = tracker.begin(state, config)
    if recording is None:
        return call()
    try:
        result = call()
    except ParentCommand as error:
        recording.finish(recording.handed_over(error))
        raise
    recording.finish(result)
    return result


async def _arecorded(
    tracker: Tracker, state: Any, config: RunnableConfig | None, call: Callable[[], Any]
) -> Any:
    """As `_recorded`, without touching a store in the event loop."""
    recording = tracker.begin(state, config)
    if recording is None:
        return await call()
    try:
        result = await call()
    except ParentCommand as error:
        await recording.afinish(recording.handed_over(error))
        raise
    await recording.afinish(result)
    return result
