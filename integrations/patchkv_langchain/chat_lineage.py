"""From which version a call in a LangGraph graph goes on, as the graph's checkpoints tell it.

Runs of one thread id are branches of each other after time travel, a fork or `update_state`, and so
are tasks side by side in one step. The messages alone do not always say so.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from patchkv_agents.errors import ContextError
from patchkv_langgraph.lineage import Link, stored_link

if TYPE_CHECKING:
    from patchkv_agents.context import ContextVersion, Message
    from patchkv_agents.engine import Thread

MAX_STEPS = 1024
"""Checkpoints of one conversation whose versions are remembered."""

_PATIENCE_S = 0.25  # a checkpoint is saved while the nodes run that start from it
_INTERVAL_S = 0.005


@dataclass(frozen=True, slots=True)
class Step:
    """Where in a run of a graph the model is called.

    Attributes:
        thread, namespace: of the checkpoints.
        checkpoint: from which the step starts.
        task: of the step.
        saver: LangGraph's checkpointer, or None.
    """

    thread: str
    namespace: str
    checkpoint: str
    task: str
    saver: Any

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Step | None:
        """The step that the configuration of a call tells of; None outside of a graph."""
        configurable = config.get("configurable") or {}
        task = str(configurable.get("checkpoint_ns") or "")
        namespace = task.rpartition("|")[0]
        checkpoint = (configurable.get("checkpoint_map") or {}).get(namespace)
        if not checkpoint:
            return None
        saver = configurable.get("__pregel_checkpointer")
        return cls(
            str(configurable.get("thread_id") or ""), namespace, checkpoint, task, saver or None
        )


class Steps:
    """The versions of one conversation by the step that made them. Used by one call at a time."""

    def __init__(self) -> None:
        self._made: OrderedDict[str, dict[str, list[str]]] = OrderedDict()  # by checkpoint and task
        self._was_read = False
        self._is_silent = False  # checkpoints were waited for in vain

    def note(self, step: Step, version: str) -> None:
        """A version was made, or asked again."""
        versions = self._made.setdefault(step.checkpoint, {}).setdefault(step.task, [])
        if version not in versions:
            versions.append(version)
        if len(self._made) > MAX_STEPS:
            self._made.popitem(last=False)

    def parent(
        self, thread: Thread, step: Step, messages: Sequence[Message]
    ) -> ContextVersion | str | None:
        """What a context was made from.

        Returns:
            A version; the empty string for none at all; None if nothing tells.
        """
        self._read(thread)
        here = self._made.get(step.checkpoint, {})
        if step.task in here:  # further calls of one task follow each other
            return _nearest(thread, here[step.task], messages)
        head = thread.history.head
        if not here and head is not None and messages[: len(head.messages)] == head.messages:
            return head
        is_whole, line = self._line(step)
        for checkpoint in line:
            if found := self._made.get(checkpoint):
                return _nearest(thread, [versions[-1] for versions in found.values()], messages)
        if is_whole:
            return "" if head is not None else None
        beside = [versions[0] for versions in here.values()]
        if not beside:
            return None
        parents = thread.history.get(min(beside)).parents
        return thread.history.get(parents[0]) if parents else ""

    def _line(self, step: Step) -> tuple[bool, list[str]]:
        """The checkpoints before a step, newest first, and whether the thread's first is there."""
        line: list[str] = []
        at = step.checkpoint
        until = time.monotonic() + (0.0 if self._is_silent else _PATIENCE_S)
        while True:
            link = _link(step, at, until if at == step.checkpoint else 0.0)
            if at == step.checkpoint:
                self._is_silent = link is None
            if link is None:
                return False, line
            if link.parent is None:
                return True, line
            at = link.parent
            line.append(at)

    def _read(self, thread: Thread) -> None:
        """Learn of what an earlier process has made."""
        if self._was_read:
            return
        self._was_read = True
        for version_id in thread.history.version_ids()[-MAX_STEPS:]:
            checkpoint = thread.history.get(version_id).checkpoint_id
            if checkpoint is not None:
                self._made.setdefault(checkpoint, {}).setdefault("", []).append(version_id)


def _link(step: Step, checkpoint: str, until: float) -> Link | None:
    if step.saver is None:
        return None
    while True:
        link = stored_link(step.saver, step.thread, step.namespace, checkpoint)
        if link is not None or time.monotonic() >= until:
            return link
        time.sleep(_INTERVAL_S)


def _nearest(thread: Thread, ids: Sequence[str], messages: Sequence[Message]) -> ContextVersion:
    """The version that most messages are shared with and fewest are given up of, else the last."""
    new = set(messages)
    found = []
    for version_id in ids:
        try:
            found.append(thread.history.get(version_id))
        except ContextError:
            continue
    return min(reversed(found), key=lambda version: len(new ^ set(version.messages)))


_steps: WeakKeyDictionary[Thread, Steps] = WeakKeyDictionary()
_lock = threading.Lock()


def steps_of(thread: Thread) -> Steps:
    """What is known of a conversation's steps."""
    with _lock:
        return _steps.setdefault(thread, Steps())
