"""Where in a LangGraph run a model is called, and which versions were made there.

Runs of one thread id are branches of each other after time travel, a fork or `update_state`, and so
are tasks of one step. The messages alone do not always tell; the graph's checkpoints do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from langgraph.checkpoint.base import BaseCheckpointSaver

from patchkv_agents.context.lineage.checkpoints import CheckpointVersions, Link, Search
from patchkv_agents.context.lineage.parents import nearest_version
from patchkv_langgraph.checkpoints import asking, astored_link
from patchkv_langgraph.tasks import Channels, channels_of

if TYPE_CHECKING:
    from patchkv_agents.context import ContextHistory, ContextVersion, Message

MAX_STEPS = 1024
"""Checkpoints of one conversation whose versions are remembered."""

_MAX_WAIT_S = 2.0  # for the answer of a saver, while the event loop that it works in is free
_SEPARATOR = "|"  # between the nodes of LangGraph's checkpoint namespaces
_TASK_ID = ":"  # between a node and the id of its task


def agent_path(namespace: str) -> str:
    """A checkpoint namespace without task ids, which are new in each turn.

    The number by which LangGraph tells several calls of a subgraph in one node stays.
    """
    return _SEPARATOR.join(part.split(_TASK_ID)[0] for part in namespace.split(_SEPARATOR))


@dataclass(frozen=True, slots=True)
class GraphLevel:
    """One of the graphs around a call.

    Attributes:
        namespace: of the graph's checkpoints.
        checkpoint: from which the graph's present step starts.
        task: of that step: its own namespace.
    """

    namespace: str
    checkpoint: str
    task: str


@dataclass(frozen=True, slots=True)
class GraphStep:
    """Where in a run of a graph the model is called.

    Attributes:
        thread: id of the checkpoints' thread.
        levels: the graphs around the call, the outermost first.
        start: the checkpoint that the run was told to start from; None for the newest one.
        saver: LangGraph's checkpointer, or None.
        channels: the innermost graph's state, the same object in all steps of a run; None where
            it cannot be read.
    """

    thread: str
    levels: tuple[GraphLevel, ...]
    start: str | None = None
    saver: BaseCheckpointSaver[Any] | None = field(default=None, compare=False, repr=False)
    channels: Channels | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> GraphStep | None:
        """The step that the configuration of a call belongs to; None outside of a graph."""
        configurable = config.get("configurable") or {}
        task = str(configurable.get("checkpoint_ns") or "")
        checkpoints = configurable.get("checkpoint_map") or {}
        parts = task.split(_SEPARATOR)
        prefixes = [_SEPARATOR.join(parts[:count]) for count in range(len(parts))]
        namespaces = [prefix for prefix in prefixes if checkpoints.get(prefix)]
        if not namespaces or namespaces[-1] != prefixes[-1]:
            return None
        levels = tuple(
            GraphLevel(namespace, checkpoints[namespace], inner)
            for namespace, inner in zip(namespaces, [*namespaces[1:], task], strict=True)
        )
        saver = configurable.get("__pregel_checkpointer")
        return cls(
            str(configurable.get("thread_id") or ""),
            levels,
            (config.get("metadata") or {}).get("checkpoint_id"),
            saver if isinstance(saver, BaseCheckpointSaver) else None,
            channels_of(configurable.get("__pregel_read")),
        )

    @property
    def checkpoint(self) -> str:
        """Of the innermost graph."""
        return self.levels[-1].checkpoint

    @property
    def is_nested(self) -> bool:
        """Whether the graph that calls the model runs inside of another one."""
        return len(self.levels) > 1

    def is_same_run(self, other: GraphStep) -> bool:
        """Whether both are calls of one task, or of one run of a graph inside of another."""
        if len(self.levels) != len(other.levels):
            return False
        outer = [(level.checkpoint, level.task) for level in self.levels[:-1]]
        if outer != [(level.checkpoint, level.task) for level in other.levels[:-1]]:
            return False
        return self.is_nested or self.levels[-1] == other.levels[-1]

    def is_beside(self, other: GraphStep) -> bool:
        """Whether both are in different tasks of one step, which may run at the same time."""
        for level, its in zip(self.levels, other.levels, strict=False):
            if level.checkpoint != its.checkpoint:
                return False
            if level.task != its.task:
                return True
        return False


class StepVersions:
    """The versions of one conversation by the step that made them."""

    def __init__(self) -> None:
        self._versions = CheckpointVersions(MAX_STEPS, notes="shown")
        self._last: GraphStep | None = None
        self._was_read = False

    def note(self, step: GraphStep, version: str) -> None:
        """A version was made, or answered again."""
        self._last = step
        for level in step.levels:
            self._versions.add_result(level.checkpoint, version, level.task)

    def parent(
        self, history: ContextHistory, step: GraphStep, messages: Sequence[Message]
    ) -> Search[ContextVersion | str | None]:
        """Search for the version that a context was made from. To be run by `asking`.

        Returns:
            A version; the empty string for none at all; None if nothing tells.
        """
        head = history.head
        if head is None:
            return None
        self._read(history)
        tasks = self._versions.results(step.checkpoint)
        task = step.levels[-1].task
        if task in tasks:  # further calls of one task follow each other
            return nearest_version(history, tasks[task], messages)
        if not tasks and messages[: len(head.messages)] == head.messages:
            return head
        if (before := self._step_before(step)) is not None:
            return nearest_version(history, before, messages)
        for level in reversed(step.levels):
            own = self._versions.results(level.checkpoint).get(level.task)
            if own and level is not step.levels[-1]:
                return nearest_version(history, own, messages)
            if step.saver is None:
                break
            hint = yield from self._versions.hint(
                step.thread,
                level.namespace,
                level.checkpoint,
                start=None if level.namespace else step.start,
            )
            if hint.versions:
                return nearest_version(history, hint.versions, messages)
            if not hint.is_first:
                break
        else:
            if not step.is_nested:
                return ""
        siblings = [versions[0] for versions in tasks.values()]
        if not siblings:
            return None
        parents = history.get(min(siblings)).parents
        return history.get(parents[0]) if parents else ""

    def _step_before(self, step: GraphStep) -> list[str] | None:
        """The versions of the last call, if that was in an earlier step of the same run."""
        last = self._last
        if last is None or last.channels is None or last.channels is not step.channels:
            return None
        level = last.levels[-1]
        if level.checkpoint >= step.checkpoint:
            return None
        return self._versions.results(level.checkpoint).get(level.task)

    def _read(self, history: ContextHistory) -> None:
        """Learn of what an earlier process has made."""
        if self._was_read:
            return
        self._was_read = True
        for version_id in history.version_ids()[-MAX_STEPS:]:
            checkpoint = history.get(version_id).checkpoint_id
            if checkpoint is not None:
                self._versions.add_result(checkpoint, version_id)


_event_loop: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar(
    "patchkv_event_loop", default=None
)


def note_event_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Say which loop waits, without being blocked, for what runs in this context."""
    _event_loop.set(loop)


def parent_of(
    versions: StepVersions,
    history: ContextHistory,
    step: GraphStep,
    messages: Sequence[Message],
) -> ContextVersion | str | None:
    """Run `StepVersions.parent` in a thread that may block.

    A saver that works in the event loop which waits for this thread is asked there.
    """
    search = versions.parent(history, step, messages)
    loop = _event_loop.get()
    if loop is None or step.saver is None:
        return asking(search, step.saver)
    link: Link | None = None
    while True:
        try:
            address = search.send(link)
        except StopIteration as end:
            found: ContextVersion | str | None = end.value
            return found
        answer = asyncio.run_coroutine_threadsafe(astored_link(step.saver, address), loop)
        try:
            link = answer.result(_MAX_WAIT_S)
        except Exception:  # the loop was stopped, or the saver failed: nothing tells
            answer.cancel()
            link = None
