"""Where in a run a node is executed, what its graph's state is, and what its result updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.channels.base import BaseChannel
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.errors import EmptyChannelError
from langgraph.types import Command

from patchkv_agents.errors import ContextError

Channels = Mapping[str, BaseChannel[Any, Any, Any]]


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
        start: the checkpoint that the run was told to start from; None for the newest one.
        saver: the graph's checkpointer, if it has one.
        channels: the state's keys as LangGraph holds them, the same object in all steps of a run;
            None where they cannot be read.
    """

    thread: str
    namespace: str
    checkpoint: str
    node: str
    order: tuple[str, ...]
    scope: str
    start: str | None = None
    saver: BaseCheckpointSaver[Any] | None = field(default=None, compare=False, repr=False)
    channels: Channels | None = field(default=None, compare=False, repr=False)

    @property
    def run(self) -> object:
        """The same small object in all steps of a run; None where channels cannot be read."""
        # A channel, which lives as long as its run, but not the state with all its messages.
        return self.channels.get("__start__", self.channels) if self.channels else None

    @property
    def is_sent(self) -> bool:
        """Whether a `Send` started it: its input need not be the graph's state."""
        return self.order[0] != "__pregel_pull"

    @classmethod
    def of(cls, config: RunnableConfig | None) -> NodeTask | None:
        """The execution that `config` describes; None outside of a graph.

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
        saver = configurable.get("__pregel_checkpointer")
        return cls(
            str(thread),
            namespace,
            checkpoint,
            node,
            (*order, scope),
            scope,
            start=None if namespace else metadata.get("checkpoint_id"),
            saver=saver if isinstance(saver, BaseCheckpointSaver) else None,
            channels=channels_of(configurable.get("__pregel_read")),
        )

    def has_key(self, key: str) -> bool | None:
        """Whether the graph's state has a key; None where it cannot be read."""
        return None if self.channels is None else key in self.channels

    def value(self, key: str) -> Any:
        """The value of a key as the step began; None while it has none."""
        try:
            return None if self.channels is None else self.channels[key].get()
        except (KeyError, EmptyChannelError):
            return None


def channels_of(read: Any) -> Channels | None:
    """The channels behind the function that LangGraph gives tasks to read the state with."""
    if isinstance(read, partial):
        for argument in read.args:
            if isinstance(argument, Mapping) and any(
                isinstance(each, BaseChannel) for each in argument.values()
            ):
                return argument
    return None


def value_in(state: Any, key: str) -> Any:
    """A key's value in a state: a dict, an object with attributes, or the list of messages itself.

    Returns:
        None if there is none.
    """
    if isinstance(state, list):
        return state
    return state.get(key) if isinstance(state, Mapping) else getattr(state, key, None)


def messages_in(state: Any, key: str) -> list[Any] | None:
    """A new list of the messages of a state; None if it has none."""
    found = value_in(state, key)
    return list(found) if isinstance(found, list | tuple) else None


def updates_of(result: Any, key: str, *, scope: str | None = None) -> Iterator[Any]:
    """What a node's result says about a key, as LangGraph would write it to the key's channel.

    Args:
        result: a dict, an object, a list of messages, a `Command`, or a list of commands and
            others.
        key: the key.
        scope: commands for this graph count also where they came from a subgraph.
    """
    if isinstance(result, Command):
        if result.graph is None or result.graph == scope:
            yield from _of_update(result.update, key)
    elif isinstance(result, list | tuple) and any(isinstance(item, Command) for item in result):
        for item in result:
            yield from updates_of(item, key)
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


Reducer = Callable[[Any, Any], Any]
"""Merges the value of a key and an update of it, as LangGraph's `add_messages` does."""
