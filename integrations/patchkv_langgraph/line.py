"""The versions of one thread and namespace, and where in them a run stands."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

from patchkv_agents.context import (
    ContextHistory,
    ContextVersion,
    Edit,
    HistoryStore,
    Message,
    ThreadKey,
    to_langchain,
)
from patchkv_langgraph.lineage import Lineage
from patchkv_langgraph.snapshots import Snapshots
from patchkv_langgraph.tasks import NodeTask, Reducer, applied

Declare = Callable[[Sequence[Message], Sequence[Message], list[Any], list[Any]], Iterable[Edit]]
"""Declares edits, given the values of old and new messages, and the messages themselves."""

# Steps whose updates are kept. A run has one at a time, and several runs may share a thread.
_MAX_STEPS = 16
# Authors of what happens outside of nodes.
_UPDATE, _INPUT = "update_state", "input"
_OUTSIDE = (None, _UPDATE, _INPUT)
# Versions that are compared with a context whose origin nothing tells.
_MAX_COMPARED = 32


@dataclass(slots=True)
class _Step:
    """What the nodes did that started from one checkpoint.

    Attributes:
        messages: LangChain messages at its beginning.
        version: the newest version that its nodes have made.
        now: the messages of that version.
        updates: by the order in which LangGraph applies them.
    """

    messages: list[Any]
    version: ContextVersion
    now: list[Any]
    updates: dict[tuple[str, ...], list[Any]] = field(default_factory=dict)


class Line:
    """Commits what tasks do to the messages of one graph, each to its branch.

    The nodes of one step start from the same messages. Their updates are put together in
    LangGraph's order, whichever is through first, so that the last of them makes the version that
    the next step starts from.

    Safe to use from several threads.
    """

    def __init__(self, store: HistoryStore, key: ThreadKey, lineage: Lineage) -> None:
        self._store = store
        self._key = key
        self._lineage = lineage
        self._snapshots = Snapshots()
        self._lock = RLock()
        self._start_anew()

    def _start_anew(self) -> None:
        self._history = ContextHistory(
            self._store, thread=self._key.thread, namespace=self._key.namespace
        )
        self._steps: OrderedDict[str, _Step] = OrderedDict()
        self._digests: dict[str, int] = {}  # of the messages, by version
        self._by_digest: dict[int, list[str]] = {}
        self._starts: dict[str, str] = {}  # the version of the state at a checkpoint
        self._made: dict[str, list[str]] = {}  # versions made by the nodes that start from one

    def begin(self, messages: Sequence[Any]) -> tuple[Message, ...]:
        """The values that messages have now."""
        with self._lock:
            return self._snapshots.take(messages)

    def finish(
        self,
        task: NodeTask,
        messages: list[Any] | None,
        before: tuple[Message, ...],
        updates: list[Any],
        *,
        reducer: Reducer,
        declare: Declare,
        author: str,
    ) -> None:
        """Commit what a node did.

        Args:
            task: the node's execution.
            messages: those it started from; None where its input was not the graph's state.
            before: what `begin` answered for them.
            updates: its updates of the messages.
            reducer: applies them.
            declare: tells what is known of the changes.
            author: who made them.
        """
        with self._lock:
            step = self._steps.get(task.checkpoint)
            if step is None or task.order in step.updates:
                step = self._open(task, messages, before, author)
            done = {**step.updates, task.order: updates}
            in_order = [each for order in sorted(done) for each in done[order]]
            now = applied(step.messages, in_order, reducer)
            values = self._snapshots.take(now)
            if values != step.version.messages:
                step.version = self._child(step.version, values) or self._commit(
                    values,
                    step.version,
                    task.checkpoint,
                    author=author,
                    edits=declare(step.version.messages, values, step.now, now),
                )
                made = self._made.setdefault(task.checkpoint, [])
                if step.version.id not in made:
                    made.append(step.version.id)
            step.now, step.updates = now, done

    def place(self, checkpoint: str, messages: Sequence[Any]) -> ContextVersion:
        """The version of these messages, at this checkpoint; committed if there is none."""
        with self._lock:
            self._read_new()
            return self._placed(checkpoint, self._snapshots.take(messages))

    def _open(
        self,
        task: NodeTask,
        messages: list[Any] | None,
        before: tuple[Message, ...],
        author: str,
    ) -> _Step:
        self._read_new()
        if messages is None:
            known = self._starts.get(task.checkpoint)
            version = self._history.get(known) if known else self._origin(task.checkpoint, None)[0]
            before = version.messages if version else ()
            messages = list(to_langchain(before))
        version = self._placed(task.checkpoint, before)
        done = [self._history.get(found) for found in self._made.get(task.checkpoint, ())]
        if done and task.checkpoint not in self._steps:
            # Another process has begun this step. Nodes that were through are not run again.
            if author not in {each.author for each in done}:
                version = done[-1]
                messages = list(to_langchain(version.messages))
        step = self._steps[task.checkpoint] = _Step(messages, version, messages)
        self._steps.move_to_end(task.checkpoint)
        if len(self._steps) > _MAX_STEPS:
            self._steps.popitem(last=False)
        return step

    def _placed(self, checkpoint: str, values: tuple[Message, ...]) -> ContextVersion:
        start = self._starts.get(checkpoint)
        if start is not None and self._has(start, values):
            return self._history.get(start)
        parent, author = self._origin(checkpoint, values)
        if parent is not None and parent.messages == values:
            version = parent  # a commit would begin a branch there, with nothing on it
        else:
            version = self._commit(values, parent, checkpoint, author=author)
        self._starts[checkpoint] = version.id
        return version

    def _child(self, parent: ContextVersion, values: tuple[Message, ...]) -> ContextVersion | None:
        """What came of a version when the same happened before: nodes may be run again."""
        for each in self._by_digest.get(_digest(values), ()):
            version = self._history.get(each)
            if version.parents[:1] == (parent.id,) and version.messages == values:
                return version
        return None

    def _commit(
        self,
        values: tuple[Message, ...],
        parent: ContextVersion | None,
        checkpoint: str,
        *,
        author: str | None,
        edits: Iterable[Edit] = (),
    ) -> ContextVersion:
        version = self._history.commit(
            values,
            # A model that shares the history has its tools there.
            tools=parent.tools if parent else None,
            template_args=parent.template_args if parent else None,
            parent=parent,
            checkpoint_id=checkpoint,
            author=author,
            edits=edits,
        )
        self._note(version)
        return version

    def _origin(
        self, checkpoint: str, values: tuple[Message, ...] | None
    ) -> tuple[ContextVersion | None, str | None]:
        """The version that the messages at a checkpoint came from, and who changed them since.

        Args:
            checkpoint: where a run stands, and no version is known.
            values: the messages there; None if they are not known.
        """
        heads = set(self._history.branches().values())
        equal = []
        if values is not None:
            alike = self._by_digest.get(_digest(values), ())
            equal = [each for each in alike if self._has(each, values)]
        if len(equal) == 1 and equal[0] in heads:
            return self._history.get(equal[0]), None  # nothing else could be meant
        sources: set[str | None] = set()
        by_nodes = False  # whether the line goes on from what the nodes at a checkpoint made
        for at, link in self._lineage.line(self._key.thread, self._key.namespace, checkpoint):
            found = self._made.get(at, []) if by_nodes else []
            if not found and at in self._starts:
                found = [self._starts[at]]
            if found:
                same = [each for each in found if each in equal]
                return self._history.get((same or found)[-1]), _author(sources)
            sources.add(link.source)
            by_nodes = link.source == "loop"
        if equal:
            return self._history.get(max(heads.intersection(equal) or equal)), None
        newest_first = [*heads, *sorted(self._digests, reverse=True)[:_MAX_COMPARED]]
        if values is None:
            return (self._history.get(max(newest_first)) if newest_first else None), None
        versions = sorted(map(self._history.get, set(newest_first)), key=lambda v: v.id)
        nearest = min(
            reversed(versions), key=lambda each: _changes(each.messages, values), default=None
        )
        return nearest, None

    def _read_new(self) -> None:
        """Learn of versions that others have committed."""
        stored = self._history.version_ids()
        if len(stored) == len(self._digests):
            return
        if not self._digests.keys() <= set(stored):  # another process has deleted the thread
            self._start_anew()
        for found in stored:
            if found in self._digests:
                continue
            version = self._history.get(found)
            self._note(version)
            checkpoint = version.checkpoint_id
            if checkpoint is None:
                continue
            if version.author in _OUTSIDE or not version.parents:
                self._starts[checkpoint] = found
            else:
                self._made.setdefault(checkpoint, []).append(found)
                self._starts.setdefault(checkpoint, version.parents[0])

    def _note(self, version: ContextVersion) -> None:
        if version.id not in self._digests:
            digest = self._digests[version.id] = _digest(version.messages)
            self._by_digest.setdefault(digest, []).append(version.id)

    def _has(self, version_id: str, values: tuple[Message, ...]) -> bool:
        if self._digests.get(version_id) != _digest(values):
            return False
        return self._history.get(version_id).messages == values


def _author(sources: Collection[str | None]) -> str | None:
    """Who made the checkpoints on the way, as far as it was not the graph's nodes."""
    for source, author in (("update", _UPDATE), ("input", _INPUT)):
        if source in sources:
            return author
    return None


def _digest(messages: Iterable[Message]) -> int:
    return hash(tuple([message.content_hash for message in messages]))


def _changes(old: Sequence[Message], new: Sequence[Message]) -> int:
    """How many messages went, came, or became others under the same id."""
    gone, came = set(old).difference(new), set(new).difference(old)
    names = {message.id for message in gone} & {message.id for message in came} - {None}
    return len(gone) + len(came) - len(names)
