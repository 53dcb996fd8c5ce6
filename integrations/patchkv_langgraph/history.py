"""The histories of a graph's threads."""

from __future__ import annotations

from collections import OrderedDict
from os import PathLike
from threading import RLock
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver

from patchkv_agents.context import (
    ContextHistory,
    ContextVersion,
    HistoryStore,
    MemoryHistoryStore,
    SQLiteHistoryStore,
    ThreadKey,
)
from patchkv_agents.context.lineage.checkpoints import Search
from patchkv_agents.errors import ContextError, InputError
from patchkv_langgraph.checkpoints import aasking, asking
from patchkv_langgraph.parts import ContextPart
from patchkv_langgraph.recorder import Recorder
from patchkv_langgraph.saver import TrackedSaver
from patchkv_langgraph.tasks import NodeTask, value_in

MAX_RECORDERS = 256
"""Threads, namespaces and keys whose last steps are kept in memory; others are read again."""

MESSAGES = "messages"
"""The key of the state whose history has no key in its name."""


class GraphHistory:
    """Keeps the versions of the context in the state of graphs, by thread, namespace and key.

    Nodes wrapped with `track_edits` commit to it. A namespace is a subgraph's, as LangGraph names
    it; the graph that is invoked has the empty one. Where a run goes on from an earlier checkpoint
    (time travel, a fork, `update_state`), its versions get a branch of their own. The graph's
    checkpointer is asked which version that is where the messages do not tell.

    Safe to use from several threads and event loops.

    Args:
        store: a store of histories, which an engine may share; or the path of an SQLite file, made
            if it does not exist. In memory if left out.
        graph: a name that keeps the threads of several graphs in one store apart; see `for_graph`.

    Raises:
        HistoryStoreError: the file cannot be opened.
        InputError: the path is `":memory:"`, or the graph's name has `|` in it.
    """

    def __init__(
        self, store: HistoryStore | str | PathLike[str] | None = None, *, graph: str = ""
    ) -> None:
        if store == ":memory:":
            raise InputError("':memory:' is no file: leave store out to keep versions in memory.")
        if "|" in graph:
            raise InputError(f"A graph's name cannot have '|' in it: {graph!r}.")
        if store is None:
            store = MemoryHistoryStore()
        elif isinstance(store, str | PathLike):
            store = SQLiteHistoryStore(store, timeout_s=_BUSY_TIMEOUT_S)
        self.store: HistoryStore = store
        self.graph = graph
        self.is_tracked = False
        self._recorders: OrderedDict[ThreadKey, Recorder] = OrderedDict()
        self._lock = RLock()

    def for_graph(self, name: str) -> GraphHistory:
        """A history of another graph in the same store.

        Two graphs with checkpointers of their own may use the same thread ids; under names of their
        own, their histories do not meet.
        """
        return GraphHistory(self.store, graph=name)

    def saver(self, checkpointer: BaseCheckpointSaver[Any]) -> TrackedSaver:
        """The graph's checkpointer, so that what happens to its threads happens to histories too.

        Passed to `compile(checkpointer=...)`. Deleting or copying a thread does so with its
        versions, and the search for a run's first version seldom has to ask the checkpointer.
        """
        return TrackedSaver(checkpointer, self)

    def open(
        self, thread_id: str, namespace: str = "", *, key: str | None = None
    ) -> ContextHistory:
        """A thread's history, at the version that was made last, whatever its branch.

        Args:
            thread_id: the thread.
            namespace: a subgraph's; the graph's own is empty.
            key: of the state. Left out: `"messages"`, or the only one there is.
        """
        named = self._key(thread_id, namespace, key or self._only_key(thread_id))
        history = ContextHistory(self.store, thread=named.thread, namespace=named.namespace)
        heads = history.branches().values()
        if heads:
            history.checkout(max(heads))
        return history

    def log(
        self, thread_id: str, namespace: str = "", *, key: str | None = None
    ) -> tuple[ContextVersion, ...]:
        """The version that was made last, and those it came from, newest first; as `open`."""
        return self.open(thread_id, namespace, key=key).log()

    def namespaces(self, thread_id: str, *, key: str | None = None) -> tuple[str, ...]:
        """The namespaces in which a thread has versions, sorted; `key` as for `open`."""
        key = key or self._only_key(thread_id)
        parts = (_split(each.namespace) for each in self._keys(thread_id))
        return tuple(sorted(namespace for _, named, namespace in parts if named == key))

    def keys(self, thread_id: str) -> tuple[str, ...]:
        """The keys of the state of which a thread has versions, sorted."""
        return tuple(sorted({_split(each.namespace)[1] for each in self._keys(thread_id)}))

    def version(
        self, state: Any, config: RunnableConfig, *, messages_key: str = MESSAGES
    ) -> ContextVersion:
        """The version of the state that a running node was given; committed if there is none.

        A node that asks a model on an engine which shares the store tells it so where the run
        stands: `thread.history.checkout(history.version(state, config).id)`. It reads and may write
        the store: in coroutines, await `aversion`.

        Args:
            state: the node's input.
            config: what LangGraph passes to the node as `config`.
            messages_key: the key of the messages in the state.

        Raises:
            ContextError: it is called outside of a graph, or the state has no messages.
        """
        task, search = self._placing(state, config, messages_key)
        return asking(search, task.saver)

    async def aversion(
        self, state: Any, config: RunnableConfig, *, messages_key: str = MESSAGES
    ) -> ContextVersion:
        """As `version`, without blocking the event loop."""
        task, search = self._placing(state, config, messages_key)
        return await aasking(search, task.saver)

    def delete_thread(self, thread_id: str) -> None:
        """Delete the versions of a thread, in all namespaces and of all keys."""
        with self._lock:
            for key in self._keys(thread_id):
                history = ContextHistory(self.store, thread=thread_id, namespace=key.namespace)
                history.delete_thread()
            for key in [key for key in self._recorders if key.thread == thread_id]:
                del self._recorders[key]

    def copy_thread(self, source_id: str, target_id: str) -> None:
        """Give a new thread the versions of another one, in all namespaces and of all keys.

        What is forgotten in one of them later is forgotten in the other too.

        Raises:
            HistoryStoreError: the new thread has versions already.
        """
        for key in self._keys(source_id):
            source = ContextHistory(self.store, thread=source_id, namespace=key.namespace)
            source.fork(target_id, namespace=key.namespace)

    def recorder(self, task: NodeTask, key: str) -> Recorder:
        """What commits to the thread, namespace and key of a task. Touches no store."""
        named = self._key(task.thread, task.namespace, key)
        with self._lock:
            if named not in self._recorders:
                self._recorders[named] = Recorder(self.store, named)
            self._recorders.move_to_end(named)
            if len(self._recorders) > MAX_RECORDERS:
                self._recorders.popitem(last=False)
            return self._recorders[named]

    def _placing(
        self, state: Any, config: RunnableConfig, key: str
    ) -> tuple[NodeTask, Search[ContextVersion]]:
        task, value = NodeTask.of(config), value_in(state, key)
        if task is None:
            raise ContextError("There is no run: call version() in a node, with its config.")
        if not isinstance(value, list | tuple):
            raise ContextError(f"The state has no list of messages under {key!r}.")
        recorder = self.recorder(task, key)
        values = recorder.take(ContextPart(key, None, None), value).values
        return task, recorder.place(task, values)

    def _key(self, thread_id: str, namespace: str, key: str) -> ThreadKey:
        is_plain = not self.graph and key == MESSAGES
        name = namespace if is_plain else _SEPARATOR.join((self.graph, key, namespace))
        return ThreadKey(thread_id, name)

    def _only_key(self, thread_id: str) -> str:
        keys = self.keys(thread_id)
        return keys[0] if len(keys) == 1 else MESSAGES

    def _keys(self, thread_id: str) -> list[ThreadKey]:
        """The store's keys of a thread of this graph."""
        return [
            key
            for key in self.store.threads()
            if key.thread == thread_id and _split(key.namespace)[0] == self.graph
        ]


# How long a commit waits for another process that writes to the same file.
_BUSY_TIMEOUT_S = 2.0

# Between graph, key and namespace; LangGraph puts one "|" between parts, which are never empty.
_SEPARATOR = "||"


def _split(name: str) -> tuple[str, str, str]:
    """Graph, key and LangGraph's namespace, from the namespace in the store."""
    parts = name.split(_SEPARATOR)
    if len(parts) != 3:
        return "", MESSAGES, name
    return parts[0], parts[1], parts[2]
