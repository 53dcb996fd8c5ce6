"""Records single executions of a tracked node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from langchain_core.runnables import RunnableConfig
from langgraph.errors import ParentCommand
from langgraph.graph.message import add_messages

from patchkv_agents.errors import ContextError
from patchkv_langgraph.checkpoints import aasking, asking
from patchkv_langgraph.events import (
    EditData,
    adispatch_edits,
    dispatch_edits,
    edit_data,
    trace_edits,
)
from patchkv_langgraph.history import GraphHistory
from patchkv_langgraph.notices import warn
from patchkv_langgraph.parts import ContextPart, Snapshot
from patchkv_langgraph.recorder import NodeChange, Recorded
from patchkv_langgraph.tasks import NodeTask, Reducer, updates_of, value_in

# A default that fits messages, and values of any other key.
_DEFAULT_REDUCERS: dict[bool, Reducer | None] = {True: add_messages, False: None}


@dataclass(frozen=True, slots=True)
class Tracker:
    """How one node is tracked; fields as the arguments of `track_edits`."""

    history: GraphHistory
    parts: tuple[ContextPart, ...]
    author: str | None
    reducer: Reducer | None
    on_error: Literal["warn", "raise"]
    _warned: set[str] = field(default_factory=set, compare=False)

    def begin(self, state: Any, config: RunnableConfig | None) -> Recording | None:
        """Note what the node starts from; None if there is nothing to record it for.

        Touches no store and waits for no lock.
        """
        try:
            task = NodeTask.of(config)
            if task is None:
                return None
            parts = [part for part in self.parts if self._has_key(task, part.key)]
            started = [self._started(part, state, task) for part in parts]
        except Exception as error:
            self.failed(error, "Nothing of it is recorded")
            return None
        return Recording(self, task, config, started) if started else None

    def failed(self, error: Exception, outcome: str) -> None:
        """Raise an error of tracking, or warn of it once."""
        if self.on_error == "raise":
            raise error
        name = self.author or "A tracked node"
        self.warn(f"{name}: {error} {outcome}; the graph goes on.", type(error).__name__)

    def warn(self, text: str, subject: str) -> None:
        """Warn once of each subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            warn(text)

    def _has_key(self, task: NodeTask, key: str) -> bool:
        if task.has_key(key) is not False:
            return True
        if "__previous__" in (task.channels or ()):
            problem = (
                "Tasks and entrypoints of LangGraph's functional API have no state to track; "
                "track nodes of a StateGraph."
            )
        else:
            names = [name for name in task.channels or () if not _is_internal(name)]
            problem = (
                f"The state of node {task.node!r} has no key {key!r}: nothing of it is recorded. "
                f"Its keys are {', '.join(names)}; pass messages_key= or contexts=."
            )
        if self.on_error == "raise":
            raise ContextError(problem)
        self.warn(problem, f"key {key}")
        return False

    def _started(self, part: ContextPart, state: Any, task: NodeTask) -> _Started:
        value = None
        if task.channels is not None:
            shown = task.value(part.key)
        else:
            shown = value = None if task.is_sent else value_in(state, part.key)
        recorder = self.history.recorder(task, part.key)
        if self.reducer is not None and part.state_part is None:
            self._compare_reducer(part, task)
        return _Started(part, value, recorder.take(part, shown))

    def _compare_reducer(self, part: ContextPart, task: NodeTask) -> None:
        channel = task.channels.get(part.key) if task.channels else None
        merges = getattr(channel, "operator", getattr(channel, "reducer", None))
        if channel is not None and merges not in (None, self.reducer):
            self.warn(
                f"The graph merges {part.key!r} by {_name(merges)}, and track_edits was given "
                f"reducer={_name(self.reducer)}. The graph's is used; leave reducer= out.",
                "reducer",
            )


@dataclass(frozen=True, slots=True)
class _Started:
    """A part of the context as a node started: its value, where LangGraph shows no state."""

    part: ContextPart
    value: Any
    before: Snapshot


@dataclass(frozen=True, slots=True)
class Recording:
    """One execution of a tracked node."""

    tracker: Tracker
    task: NodeTask
    config: RunnableConfig | None
    started: list[_Started]

    def finish(self, result: Any) -> None:
        """Record what the node did, going by what it returned."""
        for change in self._changes(result):
            try:
                recorder = self.tracker.history.recorder(self.task, change.part.key)
                recorded = asking(recorder.record(change), self.task.saver)
                dispatch_edits(self._told(change, recorded), self.config)
            except Exception as error:
                self._failed(error)

    async def afinish(self, result: Any) -> None:
        """As `finish`; the store is read and written in another thread."""
        for change in self._changes(result):
            try:
                recorder = self.tracker.history.recorder(self.task, change.part.key)
                recorded = await aasking(recorder.record(change), self.task.saver)
                await adispatch_edits(self._told(change, recorded), self.config)
            except Exception as error:
                self._failed(error)

    def handed_over(self, error: ParentCommand) -> Any:
        """What a subgraph in the node did to this graph's state by a command, as a result."""
        command = error.args[0]
        return command if command.graph == self.task.scope else None

    def _changes(self, result: Any) -> Iterator[NodeChange]:
        tracker, task = self.tracker, self.task
        for each in self.started:
            try:
                updates = list(updates_of(result, each.part.key, scope=task.scope))
            except Exception as error:
                self._failed(error)
                continue
            if updates:
                reducer = tracker.reducer or _DEFAULT_REDUCERS[each.part.state_part is None]
                author = tracker.author or task.node
                yield NodeChange(task, each.part, each.value, each.before, updates, author, reducer)

    def _told(self, change: NodeChange, recorded: Recorded) -> list[EditData]:
        """What events say of a change. Traces have it, and a warning says what was replaced."""
        if recorded.problems:
            problem = "; ".join(dict.fromkeys(recorded.problems))
            text = f"The state of node {self.task.node!r} is recorded with replacements: {problem}"
            if self.tracker.on_error == "raise":
                raise ContextError(text)
            self.tracker.warn(text, "replaced")
        data = edit_data(recorded.edits, recorded.version.id, change.part.key)
        trace_edits(data)
        return data

    def _failed(self, error: Exception) -> None:
        self.tracker.failed(error, f"What node {self.task.node!r} did is not recorded")


def _is_internal(name: str) -> bool:
    return name.startswith(("__", "branch:", "join:"))


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))
