"""What the middleware remembers of each thread of an agent."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType

from patchkv_agents.context import ContextHistory, ThreadKey
from patchkv_langchain.notes import MAX_NOTES, Note, ServingThread, Sign

if TYPE_CHECKING:
    from patchkv_agents.context import HistoryStore

RUN = "patchkv_run"
"""Key of the agent's state that names a run without a thread id."""

MAX_THREADS = 1024
"""Threads of which something is remembered; the one used longest ago is forgotten."""
_NODES = "|"  # between the parts of LangGraph's checkpoint namespaces


def thread_key(runtime: Any, state: Any) -> ThreadKey | None:
    """The thread that a hook runs for, and the part of it; None if it has no name yet.

    The part is the namespace of the graph around the node: the same for all nodes of one agent,
    and another one for each subagent.

    Args:
        runtime: LangGraph's `Runtime` or `ToolRuntime`.
        state: the agent's state.
    """
    info = getattr(runtime, "execution_info", None)
    configurable = (getattr(runtime, "config", None) or {}).get("configurable", {})
    namespace = getattr(info, "checkpoint_ns", None) or configurable.get("checkpoint_ns", "")
    thread = getattr(info, "thread_id", None) or configurable.get("thread_id")
    if thread is None and isinstance(state, Mapping):
        thread = state.get(RUN)
    if thread is None:
        return None
    return ThreadKey(str(thread), str(namespace).rpartition(_NODES)[0])


@dataclass(slots=True, eq=False)
class Remembered:
    """What is known of one thread.

    Attributes:
        notes: the newest ones, the last one last.
        serving: the engine's thread that answered last, as long as it lives.
        history: the versions, where the model does not keep them itself.
        system: for each middleware, the system message that it got and the one it passed on.
        system_author: the middleware that changed the system message for the call to come.
    """

    notes: tuple[Note, ...] = ()
    serving: ReferenceType[ServingThread] | None = None
    history: ContextHistory | None = None
    system: dict[str, tuple[Sign, Sign]] = field(default_factory=dict)
    system_author: str | None = None

    def note(self, notes: Iterable[Note]) -> None:
        """Add notes. One that is made again, as in a retry, counts once."""
        new = dict.fromkeys(notes)
        kept = [each for each in self.notes if each not in new]
        self.notes = (*kept, *new)[-MAX_NOTES:]

    def note_system(self, name: str, before: Sign, after: Sign) -> None:
        """A middleware got one system message and passed on another.

        Most add the same text to whatever they get: whoever made another one of the same is the
        author of the difference, and not the last one in the line.
        """
        last = self.system.get(name)
        if last is not None and last[0] == before and last[1] != after:
            self.system_author = name
        self.system[name] = before, after


class Threads:
    """The threads of all users of one middleware. Safe to use from several threads.

    Args:
        store: where the versions of threads are kept that no chat model keeps; in memory if left
            out, and then only as long as the thread is remembered.
    """

    def __init__(self, store: HistoryStore | None = None) -> None:
        self._store = store
        self._known: OrderedDict[ThreadKey, Remembered] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, key: ThreadKey) -> Remembered:
        """What is remembered of a thread; nothing yet if it is new."""
        with self._lock:
            found = self._known.pop(key, None) or Remembered()
            self._known[key] = found
            while len(self._known) > MAX_THREADS:
                self._known.popitem(last=False)
            return found

    def history(self, key: ThreadKey) -> ContextHistory:
        """The history of a thread: its engine's, as long as that has it, or one kept here."""
        found = self.of(key)
        serving = found.serving() if found.serving is not None else None
        if serving is not None:
            return serving.history
        with self._lock:
            if found.history is None:
                found.history = ContextHistory(
                    self._store, thread=key.thread, namespace=key.namespace
                )
            return found.history
