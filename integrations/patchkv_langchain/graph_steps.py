"""Where in a LangGraph run a model is called, and which versions were made there.

Runs of one thread id are branches of each other after time travel, a fork or `update_state`, and so
are tasks of one step. The messages alone do not always tell; the graph's checkpoints do.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkv_agents.errors import ContextError
from patchkv_langgraph.checkpoints import Address, Link, stored_link

if TYPE_CHECKING:
    from patchkv_agents.context import ContextHistory, ContextVersion, Message

MAX_STEPS = 1024
"""Checkpoints of one conversation whose versions are remembered."""

_MAX_WAIT_S = 0.25  # a checkpoint is saved while the nodes run that start from it
_INTERVAL_S = 0.005
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
        saver: LangGraph's checkpointer, or None.
    """

    thread: str
    levels: tuple[GraphLevel, ...]
    saver: Any

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
        return cls(str(configurable.get("thread_id") or ""), levels, saver or None)

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
    """The versions of one conversation by the step that made them. Used by one call at a time."""

    def __init__(self) -> None:
        # By checkpoint and task, the ids of the versions.
        self._versions: OrderedDict[str, dict[str, list[str]]] = OrderedDict()
        self._was_read = False
        self._is_silent = False  # checkpoints were waited for in vain

    def note(self, step: GraphStep, version: str) -> None:
        """A version was made, or answered again."""
        for level in step.levels:
            tasks = self._versions.setdefault(level.checkpoint, {})
            versions = tasks.setdefault(level.task, [])
            if version not in versions:
                versions.append(version)
        while len(self._versions) > MAX_STEPS:
            self._versions.popitem(last=False)

    def parent(
        self, history: ContextHistory, step: GraphStep, messages: Sequence[Message]
    ) -> ContextVersion | str | None:
        """The version that a context was made from.

        Returns:
            A version; the empty string for none at all; None if nothing tells.
        """
        head = history.head
        if head is None:
            return None
        self._read(history)
        tasks = self._versions.get(step.checkpoint, {})
        task = step.levels[-1].task
        if task in tasks:  # further calls of one task follow each other
            return _nearest(history, tasks[task], messages)
        if not tasks and messages[: len(head.messages)] == head.messages:
            return head
        is_whole = True
        for level in reversed(step.levels):
            own = self._versions.get(level.checkpoint, {}).get(level.task)
            if own and level is not step.levels[-1]:
                return _nearest(history, own, messages)
            is_whole = False
            for checkpoint in self._ancestors(step, level):
                if checkpoint is None:
                    is_whole = True
                elif versions := self._versions.get(checkpoint):
                    newest = [versions[-1] for versions in versions.values()]
                    return _nearest(history, newest, messages)
            if not is_whole:
                break
        if is_whole and not step.is_nested:
            return ""
        siblings = [versions[0] for versions in tasks.values()]
        if not siblings:
            return None
        parents = history.get(min(siblings)).parents
        return history.get(parents[0]) if parents else ""

    def _ancestors(self, step: GraphStep, level: GraphLevel) -> Iterator[str | None]:
        """The checkpoints before one of a graph, newest first; None behind the thread's first."""
        checkpoint: str | None = level.checkpoint
        is_first = level is step.levels[-1]
        until = time.monotonic() + (_MAX_WAIT_S if is_first and not self._is_silent else 0.0)
        while checkpoint is not None:
            link = _link(step, level.namespace, checkpoint, until)
            if is_first and checkpoint == level.checkpoint:
                self._is_silent = link is None
            if link is None:
                return
            checkpoint, until = link.parent, 0.0
            yield checkpoint

    def _read(self, history: ContextHistory) -> None:
        """Learn of what an earlier process has made."""
        if self._was_read:
            return
        self._was_read = True
        for version_id in history.version_ids()[-MAX_STEPS:]:
            checkpoint = history.get(version_id).checkpoint_id
            if checkpoint is not None:
                tasks = self._versions.setdefault(checkpoint, {})
                tasks.setdefault("", []).append(version_id)


def _link(step: GraphStep, namespace: str, checkpoint: str, until: float) -> Link | None:
    if step.saver is None:
        return None
    while True:
        link = stored_link(step.saver, Address(step.thread, namespace, checkpoint))
        if link is not None or time.monotonic() >= until:
            return link
        time.sleep(_INTERVAL_S)


def _nearest(
    history: ContextHistory, ids: Sequence[str], messages: Sequence[Message]
) -> ContextVersion:
    """The version that differs from the messages in the fewest of them; the last of several."""
    new = set(messages)
    versions = []
    for version_id in ids:
        try:
            versions.append(history.get(version_id))
        except ContextError:
            continue
    return min(reversed(versions), key=lambda version: len(new ^ set(version.messages)))
