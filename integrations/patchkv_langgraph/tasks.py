"""Where in a run a node is executed, and what its result means for the messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.errors import EmptyChannelError
from langgraph.types import Command, Overwrite

from patchkv_agents.errors import ContextError

Reducer = Callable[[Any, Any], Any]
"""Merges the messages of a state and an update of them, as LangGraph's `add_messages` does."""


@dataclass(frozen=True, slots=True)
class NodeTask:
    """One execution of a node.

    Attributes:
        thread: the thread's id.
        namespace: the graph's checkpoint namespace: empty for the graph that was invoked.
        checkpoint: the checkpoint that the step starts from.
        node: the node's name in its graph.
        order: sorts the tasks of one step as LangGraph applies their updates; unique among them.
        scope: the task's own namespace, that of a subgraph in it.
    """

    thread: str
    namespace: str
    checkpoint: str
    node: str
    order: tuple[str, ...]
    scope: str

    @property
    def is_sent(self) -> bool:
        """Whether a `Send` started it: its input need not be the graph's state."""
        return self.order[0] != "__pregel_pull"

    @classmethod
    def of(cls, config: RunnableConfig | None) -> NodeTask | None:
        """The execution that LangGraph tells of in `config`; None outside of a graph.

        Raises:
            ContextError: the run has no thread id.
        """
        configurable = (config or {}).get("configurable", {})
        scope = configurable.get("checkpoint_ns") or ""
        namespace, _, own = scope.rpartition("|")
        checkpoint = configurable.get("checkpoint_map", {}).get(namespace)
        if not checkpoint:
            return None
        thread = configurable.get("thread_id")
        if thread is None or thread == "":
            raise ContextError(
                "A tracked node needs to know its thread: invoke the graph with "
                "config={'configurable': {'thread_id': ...}}."
            )
        metadata = (config or {}).get("metadata", {})
        node = str(metadata.get("langgraph_node") or own.partition(":")[0])
        path = tuple(metadata.get("langgraph_path") or ("__pregel_pull", node))
        # Nodes go by name, and sent tasks by number; the scope tells apart what is left.
        order = [f"{part:09}" if isinstance(part, int) else str(part) for part in path[:2]]
        return cls(str(thread), namespace, checkpoint, node, (*order, scope), scope)


def messages_in(state: Any, key: str) -> list[Any] | None:
    """The messages of a state, which is a dict, an object with attributes, or the list itself.

    Returns:
        A new list of the same messages; None if there are none.
    """
    if isinstance(state, list):
        return list(state)
    found = state.get(key) if isinstance(state, Mapping) else getattr(state, key, None)
    return list(found) if isinstance(found, list | tuple) else None


def state_read(config: RunnableConfig | None, key: str) -> Any:
    """A value of the graph's state as the step began, whatever the node was given; None if unknown.

    By what LangGraph puts in the configuration for conditional edges and `ToolNode`.
    """
    read = (config or {}).get("configurable", {}).get("__pregel_read")
    try:
        return None if read is None else read(key)
    except (KeyError, EmptyChannelError):
        return None


def message_updates(result: Any, key: str, *, scope: str | None = None) -> Iterator[Any]:
    """What a node's result says about the messages, as LangGraph would write it to their channel.

    Args:
        result: a dict, an object, a list of messages, a `Command`, or a list of commands and
            others.
        key: the messages' key in the state.
        scope: commands for this graph count also where they came from a subgraph.
    """
    if isinstance(result, Command):
        if result.graph is None or result.graph == scope:
            yield from _of_update(result.update, key)
    elif isinstance(result, list | tuple) and any(isinstance(item, Command) for item in result):
        for item in result:
            yield from message_updates(item, key)
    elif isinstance(result, list):
        if result:
            yield result  # a state that is nothing but messages
    elif result is not None:
        yield from _of_update(result, key)


def _of_update(update: Any, key: str) -> Iterator[Any]:
    if isinstance(update, Mapping):
        if key in update:
            yield update[key]
    elif isinstance(update, list | tuple):
        pairs = [item for item in update if isinstance(item, tuple) and len(item) == 2]
        if len(pairs) == len(update):
            yield from (value for name, value in pairs if name == key)
        else:
            yield update
    elif (value := getattr(update, key, None)) is not None:
        yield value


def applied(messages: Sequence[Any], updates: Sequence[Any], reducer: Reducer) -> list[Any]:
    """The messages after the updates of one step, as LangGraph merges them.

    An `Overwrite` takes the place of everything else in its step.
    """
    for update in updates:
        if isinstance(update, Overwrite):
            return list(update.value)
        if isinstance(update, Mapping) and update.keys() == {"__overwrite__"}:
            return list(update["__overwrite__"])
    result = list(messages)
    for update in updates:
        result = list(reducer(result, update))
    return result
