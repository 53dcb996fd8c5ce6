"""Commits what the nodes of one graph do to one part of a thread's context."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any

from langchain_core.messages import BaseMessage

from patchkv_agents.context import (
    ContextHistory,
    ContextVersion,
    Edit,
    HistoryStore,
    Message,
    ThreadKey,
    to_langchain,
)
from patchkv_agents.context.lineage.checkpoints import INPUT, UPDATE, CheckpointVersions, Search
from patchkv_agents.context.lineage.index import VersionIndex
from patchkv_agents.context.lineage.parents import Hint, certain_parent, find_parent
from patchkv_langgraph.merging import merged, overwriting
from patchkv_langgraph.parts import ContextPart, Snapshot
from patchkv_langgraph.snapshots import Snapshots
from patchkv_langgraph.tasks import NodeTask, Reducer

MAX_STEPS = 16
"""Steps whose updates are kept. A run has one at a time, and several runs may share a thread."""

_OUTSIDE = (None, UPDATE, INPUT)
"""Authors of versions that no node made."""


@dataclass(frozen=True, slots=True)
class NodeChange:
    """What one execution of a node does to a part of the context.

    Attributes:
        task: the execution.
        part: of the context.
        value: of the part's key, where the graph's state cannot be read.
        before: the part as the node started.
        updates: of the key, from the node's result.
        author: of the edits.
        reducer: merges where the graph's state cannot be read.
    """

    task: NodeTask
    part: ContextPart
    value: Any
    before: Snapshot
    updates: list[Any]
    author: str
    reducer: Reducer | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded of a change.

    Attributes:
        version: that the change led to.
        edits: of the version; empty if it was there already.
        problems: what of the messages had to be replaced.
    """

    version: ContextVersion
    edits: tuple[Edit, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class _Step:
    """What the nodes did that started from one checkpoint.

    Attributes:
        run: that worked on it last (`NodeTask.run`); tells its further steps.
        value: of the key at its beginning, where that is not the graph's own.
        version: the newest version that its nodes have made.
        updates: by the order in which LangGraph applies them.
    """

    run: object
    value: Any
    version: ContextVersion
    updates: dict[tuple[str, ...], list[Any]] = field(default_factory=dict)


class Recorder:
    """Commits what tasks do to a part of the context of one graph, each to its branch.

    The nodes of one step start from the same state. Their updates are put together in LangGraph's
    order, whichever is through first, so that the last of them makes the version that the next step
    starts from.

    Safe to use from several threads. Creating one and `take` touch no store and wait for no lock.
    """

    def __init__(self, store: HistoryStore, key: ThreadKey) -> None:
        self._store = store
        self._key = key
        self._snapshots = Snapshots()
        self._lock = RLock()
        self._index: VersionIndex | None = None
        self._steps: OrderedDict[str, _Step] = OrderedDict()
        self._versions = CheckpointVersions()

    def take(self, part: ContextPart, value: Any) -> Snapshot:
        """What a part of the context is now."""
        return part.take(value, self._snapshots)

    def record(self, change: NodeChange) -> Search[Recorded]:
        """Commit what a node did. To be run by `asking` or `aasking`."""
        task = change.task
        with self._lock:
            index = self._refreshed()
            if self._has_step(task) or self._has_parent(index, task, change.before.values):
                return self._recorded(index, change, None)
        hint = yield from self._hint(task)
        with self._lock:
            return self._recorded(self._refreshed(), change, hint)

    def _recorded(self, index: VersionIndex, change: NodeChange, hint: Hint | None) -> Recorded:
        task = change.task
        step = self._steps[task.checkpoint] if self._has_step(task) else None
        if step is None:
            step = self._open(index, change, hint)
        done = {**step.updates, task.order: change.updates}
        now = self._merged(change, step, done)
        edits: tuple[Edit, ...] = ()
        if now.values != step.version.messages:
            version = index.child(step.version, now.values)
            if version is None:
                declared = change.part.declare(self._before(change, step), now, change.author)
                version = self._commit(
                    index, now.values, step.version, task, change.author, declared
                )
                edits = version.edits
            step.version = version
            self._versions.add_result(task.checkpoint, version.id)
        step.updates, step.run = done, task.run
        return Recorded(step.version, edits, (*change.before.problems, *now.problems))

    def place(self, task: NodeTask, values: tuple[Message, ...]) -> Search[ContextVersion]:
        """The version of the state that a task was given; committed if there is none."""
        with self._lock:
            index = self._refreshed()
            if self._has_parent(index, task, values):
                return self._placed(index, task, values, None)
        hint = yield from self._hint(task)
        with self._lock:
            return self._placed(self._refreshed(), task, values, hint)

    def _has_step(self, task: NodeTask) -> bool:
        """Whether other nodes of the step were recorded, and this one was not."""
        step = self._steps.get(task.checkpoint)
        return step is not None and task.order not in step.updates

    def _has_parent(self, index: VersionIndex, task: NodeTask, values: tuple[Message, ...]) -> bool:
        """Whether no saver need be asked for the version that a step starts from."""
        if not len(index) or self._previous(task) is not None:
            return True
        start = self._versions.start(task.checkpoint)
        if start is not None and index.holds(start, values):
            return True
        if task.saver is None:
            return True
        return not hasattr(task.saver, "links") and certain_parent(index, values) is not None

    def _previous(self, task: NodeTask) -> _Step | None:
        """The step before this one in the same run, as far as tracked nodes took part."""
        if task.run is None:
            return None
        same = [
            checkpoint
            for checkpoint, step in self._steps.items()
            if step.run is task.run and checkpoint < task.checkpoint
        ]
        return self._steps[max(same)] if same else None

    def _before(self, change: NodeChange, step: _Step) -> Snapshot:
        """The part as the nodes of a step that are through have left it.

        A step keeps no messages of the graph's: they would outlive their run.
        """
        is_first = not step.updates and step.value is change.value
        before = change.before if is_first else self._merged(change, step, step.updates)
        return replace(before, values=step.version.messages)

    def _merged(
        self, change: NodeChange, step: _Step, done: dict[tuple[str, ...], list[Any]]
    ) -> Snapshot:
        """The part after the updates of a step so far."""
        task, key = change.task, change.part.key
        updates = [each for order in sorted(done) for each in done[order]]
        value = task.value(key) if step.value is None and task.has_key(key) else step.value
        channel = task.channels[key] if task.channels and task.has_key(key) else None
        now = self.take(change.part, merged(value, updates, channel, change.reducer))
        return _without_passing_ids(now, value, updates)

    def _open(self, index: VersionIndex, change: NodeChange, hint: Hint | None) -> _Step:
        task = change.task
        version = self._placed(index, task, change.before.values, hint)
        value = change.value
        made = self._versions.results(task.checkpoint).get("", ())
        done = [index.history.get(each) for each in made]
        if done and task.checkpoint not in self._steps:
            # Another process has begun this step. Nodes that were through are not run again.
            if change.author not in {each.author for each in done}:
                version = done[-1]
                natives = () if change.part.state_part else tuple(to_langchain(version.messages))
                value = list(natives) or value
        step = self._steps[task.checkpoint] = _Step(task.run, value, version)
        self._steps.move_to_end(task.checkpoint)
        if len(self._steps) > MAX_STEPS:
            self._steps.popitem(last=False)
        return step

    def _placed(
        self, index: VersionIndex, task: NodeTask, values: tuple[Message, ...], hint: Hint | None
    ) -> ContextVersion:
        start = self._versions.start(task.checkpoint)
        if start is not None and index.holds(start, values):
            return index.history.get(start)
        previous = self._previous(task)
        parent = previous.version if previous else find_parent(index, values, hint)
        if parent is not None and parent.messages == values:
            version = parent  # a commit would begin a branch there, with nothing on it
        else:
            author = None if previous or hint is None else hint.author
            version = self._commit(index, values, parent, task, author)
        self._versions.set_start(task.checkpoint, version.id)
        return version

    def _commit(
        self,
        index: VersionIndex,
        values: tuple[Message, ...],
        parent: ContextVersion | None,
        task: NodeTask,
        author: str | None,
        edits: Iterable[Edit] = (),
    ) -> ContextVersion:
        version = index.history.commit(
            values,
            # A model that shares the history has its tools there.
            tools=parent.tools if parent else None,
            template_args=parent.template_args if parent else None,
            parent=parent if parent or not len(index) else "",
            checkpoint_id=task.checkpoint,
            author=author,
            edits=edits,
        )
        index.add(version)
        return version

    def _hint(self, task: NodeTask) -> Search[Hint]:
        """What the graph's checkpoints tell of where the state at a step comes from."""
        return self._versions.hint(task.thread, task.namespace, task.checkpoint, start=task.start)

    def _refreshed(self) -> VersionIndex:
        """The index, with the versions that others have committed."""
        if self._index is not None:
            added = self._index.refresh()
        if self._index is None or added is None:  # at first, or after another deleted the thread
            self._steps.clear()
            self._versions = CheckpointVersions()
            history = ContextHistory(
                self._store, thread=self._key.thread, namespace=self._key.namespace
            )
            self._index = VersionIndex(history)
            added = self._index.refresh()
        for version in added or ():
            checkpoint = version.checkpoint_id
            if checkpoint is None:
                continue
            if version.author in _OUTSIDE or not version.parents:
                self._versions.set_start(checkpoint, version.id)
            else:
                self._versions.add_result(checkpoint, version.id)
                if self._versions.start(checkpoint) is None:
                    self._versions.set_start(checkpoint, version.parents[0])
        return self._index


def _without_passing_ids(now: Snapshot, value: Any, updates: list[Any]) -> Snapshot:
    """The snapshot without ids that merging made up, which are others when the graph merges.

    LangGraph makes messages of dicts, tuples and texts, and gives each a random id.
    """
    lists = [value]
    is_plain = True
    for update in updates:
        is_overwrite, new = overwriting(update)
        items = new if is_overwrite else update
        lists.append(items if isinstance(items, list | tuple) else [items])
        is_plain &= all(isinstance(item, BaseMessage) for item in lists[-1])
    if is_plain or not now.natives:
        return now
    items = [item for each in lists if isinstance(each, list | tuple) for item in each]
    given = set(map(id, items))
    ids = {
        item.get("id") if isinstance(item, dict) else getattr(item, "id", None) for item in items
    }
    values = tuple(
        message
        if id(native) in given or native.id in ids or str(native.id).startswith("pkv-")
        else replace(message, id=None)
        for message, native in zip(now.values, now.natives, strict=True)
    )
    return replace(now, values=values)
