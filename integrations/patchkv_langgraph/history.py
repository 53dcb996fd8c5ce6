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
from patchkv_agents.errors import ContextError
from patchkv_langgraph.line import Line
from patchkv_langgraph.lineage import Lineage
from patchkv_langgraph.saver import TrackedSaver
from patchkv_langgraph.tasks import NodeTask, messages_in

# Threads and namespaces whose last steps are kept in memory; the others are read again.
_MAX_LINES = 256


class GraphHistory:
    """Keeps the versions of the messages in the state of graphs, by thread and namespace.

    Nodes wrapped with `track_edits` commit to it. A namespace is a subgraph's, as LangGraph names
    it; the graph that is invoked has the empty one. Where a run goes on from an earlier checkpoint
    (time travel, a fork, `update_state`), its versions get a branch of their own. Which version
    that is is told by the messages; `saver` makes it certain where several could be meant.

    Safe to use from several threads and event loops.

    Args:
        store: a store of histories, which an engine may share; or the path of an SQLite file, made
            if it does not exist. In memory if left out.

    Raises:
        HistoryStoreError: the file cannot be opened.
    """

    def __init__(self, store: HistoryStore | str | PathLike[str] | None = None) -> None:
        if store is None:
            store = MemoryHistoryStore()
        elif isinstance(store, str | PathLike):
            store = SQLiteHistoryStore(store)
        self.store: HistoryStore = store
        self._lineage = Lineage()
        self._lines: OrderedDict[ThreadKey, Line] = OrderedDict()
        self._lock = RLock()

    def saver(self, checkpointer: BaseCheckpointSaver[Any]) -> TrackedSaver:
        """The graph's checkpointer, so that what happens to its threads happens to histories too.

        Passed to `compile(checkpointer=...)`. Deleting or copying a thread does so with its
        versions, and checkpoints tell which version a run starts from.
        """
        return TrackedSaver(checkpointer, self)

    def open(self, thread_id: str, namespace: str = "") -> ContextHistory:
        """A thread's history, at the version that was made last, whatever its branch."""
        history = ContextHistory(self.store, thread=thread_id, namespace=namespace)
        heads = history.branches().values()
        if heads:
            history.checkout(max(heads))
        return history

    def log(self, thread_id: str, namespace: str = "") -> tuple[ContextVersion, ...]:
        """The version that was made last, and those it came from, newest first."""
        return self.open(thread_id, namespace).log()

    def namespaces(self, thread_id: str) -> tuple[str, ...]:
        """The namespaces in which a thread has versions, sorted."""
        return tuple(key.namespace for key in self.store.threads() if key.thread == thread_id)

    def version(
        self, state: Any, config: RunnableConfig, *, messages_key: str = "messages"
    ) -> ContextVersion:
        """The version of the state that a running node was given; committed if there is none.

        A node that asks a model on an engine which shares the store tells it so where the run
        stands: `thread.history.checkout(history.version(state, config).id)`. A coroutine function
        calls it through `asyncio.to_thread`, since it may write, and wait for a checkpoint.

        Args:
            state: the node's input.
            config: what LangGraph passes to the node as `config`.
            messages_key: the key of the messages in the state.

        Raises:
            ContextError: it is called outside of a graph, or the state has no messages.
        """
        task, messages = NodeTask.of(config), messages_in(state, messages_key)
        if task is None:
            raise ContextError("There is no run: call version() in a node, with its config.")
        if messages is None:
            raise ContextError(f"The state has no list of messages under {messages_key!r}.")
        return self.line(task).place(task.checkpoint, messages)

    def delete_thread(self, thread_id: str) -> None:
        """Delete the versions of a thread, in all namespaces."""
        with self._lock:
            for namespace in self.namespaces(thread_id):
                ContextHistory(self.store, thread=thread_id, namespace=namespace).delete_thread()
            self._forget_lines(thread_id)

    def copy_thread(self, source_id: str, target_id: str) -> None:
        """Give a new thread the versions of another one, in all namespaces.

        What is forgotten in one of them later is forgotten in the other too.

        Raises:
            HistoryStoreError: the new thread has versions already.
        """
        for namespace in self.namespaces(source_id):
            source = ContextHistory(self.store, thread=source_id, namespace=namespace)
            source.fork(target_id, namespace=namespace)

    def line(self, task: NodeTask) -> Line:
        """What commits to the thread and namespace of a task."""
        key = ThreadKey(task.thread, task.namespace)
        with self._lock:
            if key not in self._lines:
                self._lines[key] = Line(self.store, key, self._lineage)
            self._lines.move_to_end(key)
            if len(self._lines) > _MAX_LINES:
                self._lines.popitem(last=False)
            return self._lines[key]

    @property
    def lineage(self) -> Lineage:
        """What is known of checkpoints."""
        return self._lineage

    def _forget_lines(self, thread_id: str) -> None:
        self._lineage.forget(thread_id)
        for key in [key for key in self._lines if key.thread == thread_id]:
            del self._lines[key]
