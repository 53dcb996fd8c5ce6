"""What the middleware remembers of each agent in each thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

from langgraph.config import get_config

from patchkv_agents.context import ContextHistory, SQLiteHistoryStore, ThreadKey
from patchkv_langchain.agent_log import AgentLog
from patchkv_langchain.conversations import chosen
from patchkv_langchain.graph_steps import GraphStep, agent_path
from patchkv_langchain.notes import MAX_NOTES, Note, ServingThread, Sign

if TYPE_CHECKING:
    from patchkv_agents.context import HistoryStore, Message

RUN = "patchkv_run"
"""Key of the agent's state that names a run without a thread id."""

MAX_THREADS = 1024
"""Agents of which something is remembered; the one used longest ago is forgotten."""
_MAX_SERVING = 16
_NODES = "|"  # between the parts of LangGraph's checkpoint namespaces
_NUMBER = "#"  # before the number of further conversations of one agent


def run_config() -> Mapping[str, Any]:
    """LangChain's configuration of the run; empty outside of a run."""
    try:
        return get_config()
    except RuntimeError:  # or in asynchronous code on Python 3.10
        return {}


def agent_key(configurable: Mapping[str, Any], metadata: Mapping[str, Any]) -> ThreadKey | None:
    """The thread that an agent runs in, and the agent's path in it; None without a thread id.

    The path has the nodes around the agent's own graph: empty for an agent that is the graph
    itself, and behind a tool that runs it, its name.
    """
    thread = configurable.get("thread_id")
    if thread is None:
        return None
    path = agent_path(str(configurable.get("checkpoint_ns") or "").rpartition(_NODES)[0])
    name = metadata.get("lc_agent_name")
    if path and name and path.rpartition(_NODES)[2] != name:
        path = f"{path}/{name}"
    return ThreadKey(str(thread), path)


def runtime_key(runtime: Any, state: Any) -> ThreadKey | None:
    """As `agent_key`, for what the hooks of a middleware get; None if a run has no name yet.

    Args:
        runtime: LangGraph's `Runtime` or `ToolRuntime`.
        state: the agent's state.
    """
    config = getattr(runtime, "config", None) or run_config()
    given = config.get("configurable") or {}
    info = getattr(runtime, "execution_info", None)
    namespace = getattr(info, "checkpoint_ns", None) or given.get("checkpoint_ns", "")
    thread = getattr(info, "thread_id", None) or given.get("thread_id")
    if thread is None and isinstance(state, Mapping):
        thread = state.get(RUN)
    return agent_key(
        {"thread_id": thread, "checkpoint_ns": namespace}, config.get("metadata") or {}
    )


class AgentThread:
    """Notes, logs and engine threads of one agent in one thread. Safe to use from several threads.

    Attributes:
        notes: the newest ones, the last one last.
        logs: of its conversations, where the model does not keep the versions itself. Further ones
            are those of runs side by side, and of a subagent that is called again.
        logs_lock: guards the logs; held while a store is read.
    """

    def __init__(self) -> None:
        self.notes: tuple[Note, ...] = ()
        self.logs: list[AgentLog] = []
        self._serving: OrderedDict[str, ReferenceType[ServingThread]] = OrderedDict()
        self._system: dict[str, tuple[Sign, Sign]] = {}
        self._system_author: str | None = None
        self.logs_lock = threading.Lock()
        self._lock = threading.Lock()

    def note(self, notes: Iterable[Note]) -> None:
        """Add notes. One that is made again, as in a retry, counts once."""
        new = dict.fromkeys(notes)
        with self._lock:
            others = [each for each in self.notes if each not in new]
            self.notes = (*others, *new)[-MAX_NOTES:]

    def note_system(self, name: str, before: Sign, after: Sign) -> None:
        """A middleware got one system message and passed on another.

        Most add the same text to whatever they get: the author of a difference is whoever made
        another one of the same, and not the last one in the list.
        """
        with self._lock:
            last = self._system.get(name)
            if last is not None and last[0] == before and last[1] != after:
                self._system_author = name
            self._system[name] = before, after

    def take_system_author(self) -> str | None:
        """The middleware that changed the system message for the call to come."""
        with self._lock:
            author, self._system_author = self._system_author, None
            return author

    def serve(self, run: str, thread: ServingThread) -> None:
        """An engine's thread answers the agent, in a run of this namespace."""
        with self._lock:
            self._serving.pop(run, None)
            self._serving[run] = ref(thread)
            while len(self._serving) > _MAX_SERVING:
                self._serving.popitem(last=False)

    def serving(self, run: str | None = None) -> ServingThread | None:
        """The thread that answered last, in a run or at all, as long as it lives."""
        with self._lock:
            if run is None:
                reference = next(reversed(self._serving.values()), None)
            else:
                reference = self._serving.get(run)
        return None if reference is None else reference()


class AgentThreads:
    """The agents of all users of one middleware. Safe to use from several threads.

    Args:
        store: where the versions of contexts are kept that no chat model keeps, or a SQLite file
            that is opened at its first use; in memory if left out, and then only as long as the
            agent is remembered.
    """

    def __init__(self, store: HistoryStore | str | Path | None = None) -> None:
        self._given = store
        self._opened: HistoryStore | None = None
        self._opening = threading.Lock()
        self._threads: OrderedDict[ThreadKey, AgentThread] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def _store(self) -> HistoryStore | None:
        if not isinstance(self._given, str | Path):
            return self._given
        with self._opening:
            if self._opened is None:
                self._opened = SQLiteHistoryStore(self._given)
            return self._opened

    def of(self, key: ThreadKey) -> AgentThread:
        """What is remembered of an agent; nothing yet if it is new."""
        with self._lock:
            agent = self._threads.pop(key, None) or AgentThread()
            self._threads[key] = agent
            while len(self._threads) > MAX_THREADS:
                self._threads.popitem(last=False)
            return agent

    def keys(self) -> tuple[ThreadKey, ...]:
        """The conversations that were seen, and those in the store; the newest last."""
        with self._lock:
            threads = list(self._threads.items())
        store = self._store
        keys = {} if store is None else dict.fromkeys(store.threads())
        for key, agent in threads:
            served = [] if agent.serving() is None else [key]
            for each in (*served, *(log.history.key for log in list(agent.logs))):
                keys.pop(each, None)
                keys[each] = None
        return tuple(keys)

    def history(self, key: ThreadKey) -> ContextHistory:
        """The history of a conversation: its engine's, as long as that has it, or the log's."""
        base, _, number = key.namespace.partition(_NUMBER)
        agent = self.of(ThreadKey(key.thread, base))
        serving = agent.serving()
        if serving is not None and not number:
            return serving.history
        for log in list(agent.logs):
            if log.history.key == key:
                return log.history
        return ContextHistory(self._store, thread=key.thread, namespace=key.namespace)

    def log(self, key: ThreadKey, messages: Sequence[Message], step: GraphStep | None) -> AgentLog:
        """The log of the conversation that a call belongs to. Reads the store for a new one.

        Args:
            key: of the agent.
            messages: of the call.
            step: of the graph around, if there is one.
        """
        agent = self.of(key)
        with agent.logs_lock:
            while True:
                log = chosen(agent.logs, messages, step, is_named=True)
                if log is None:
                    number = len(agent.logs) + 1
                    name = key.namespace if number == 1 else f"{key.namespace}{_NUMBER}{number}"
                    history = ContextHistory(self._store, thread=key.thread, namespace=name)
                    log = AgentLog(history)
                    agent.logs.append(log)
                    if step is not None and step.is_nested and log.relation(messages) == "other":
                        continue  # an earlier process's
                agent.logs.remove(log)
                agent.logs.append(log)
                log.step = step
                return log
