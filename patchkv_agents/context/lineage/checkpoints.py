"""Versions by the checkpoints of an agent framework, and the search for those that a run came from.

A checkpoint is a state that the framework has saved: it has an id that sorts by time, a parent, and
a source. From its state the nodes of one step start, and what they make is the next checkpoint.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Generator
from dataclasses import dataclass
from threading import RLock
from typing import Literal, TypeVar

from patchkv_agents.context.lineage.parents import Hint

MAX_HOPS = 1_000
"""Checkpoints that one search follows at most."""

UPDATE, INPUT = "update_state", "input"
"""Authors of what happens outside of nodes."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Link:
    """A checkpoint, its parent, and what made it: `input`, `loop` (nodes), `update` or `fork`."""

    checkpoint: str
    parent: str | None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """A checkpoint of a thread and namespace; the newest one if `checkpoint` is None."""

    thread: str
    namespace: str
    checkpoint: str | None = None


Search = Generator[Address, "Link | None", T]
"""Asks for links of checkpoints, one after the other, and returns what it found.

Whoever runs it asks the framework. So a search holds no lock while a checkpointer is asked, and is
the same for synchronous and asynchronous ones.
"""


class CheckpointVersions:
    """Versions by the checkpoints at which they were made. Safe to use from several threads.

    Args:
        max_checkpoints: how many are kept; None for all.
        notes: what `add_result` is told: versions that a task `made` of the state at a checkpoint,
            or those that it was `shown`, which are that state.
    """

    def __init__(
        self, max_checkpoints: int | None = None, *, notes: Literal["made", "shown"] = "made"
    ) -> None:
        self._max = max_checkpoints
        self._notes = notes
        self._starts: dict[str, str] = {}
        self._results: dict[str, dict[str, list[str]]] = {}  # by checkpoint and task
        self._checkpoints: list[str] = []  # those of `_results`, sorted
        self._lock = RLock()

    def set_start(self, checkpoint: str, version_id: str) -> None:
        """Say which version the state at a checkpoint is."""
        with self._lock:
            self._starts[checkpoint] = version_id

    def start(self, checkpoint: str) -> str | None:
        """The version of the state at a checkpoint."""
        return self._starts.get(checkpoint)

    def add_result(self, checkpoint: str, version_id: str, task: str = "") -> None:
        """Note a version that a task made which starts from a checkpoint."""
        with self._lock:
            if checkpoint not in self._results:
                self._results[checkpoint] = {}
                insort(self._checkpoints, checkpoint)
            versions = self._results[checkpoint].setdefault(task, [])
            if version_id not in versions:
                versions.append(version_id)
            if self._max is not None and len(self._results) > self._max:
                del self._results[self._checkpoints.pop(0)]

    def results(self, checkpoint: str) -> dict[str, list[str]]:
        """The versions that tasks made which start from a checkpoint, by task."""
        return self._results.get(checkpoint, {})

    def hint(
        self,
        thread: str,
        namespace: str,
        checkpoint: str,
        *,
        start: str | None = None,
    ) -> Search[Hint]:
        """Search for where the state at a checkpoint comes from.

        Args:
            thread, namespace, checkpoint: where the state is.
            start: the checkpoint that the run was told to start from; None for the newest one.
        """
        sources: set[str | None] = set()
        at = checkpoint
        link = yield Address(thread, namespace, at)
        if link is None:  # not saved yet, or only at the end of the run
            sources.add("input")
            link = yield Address(thread, namespace, start)
            if link is None and start is None:
                return Hint(is_first=True)
            if link is not None and link.checkpoint > at:
                return Hint()
            at = start or (link.checkpoint if link else at)
        below, by_nodes = at, False
        for _ in range(MAX_HOPS):
            is_here = at == checkpoint and self._notes == "shown"  # of tasks side by side
            if not is_here and (versions := self._versions_at(at, below, by_nodes)):
                return Hint(versions, author=_author(sources))
            if link is None:
                return Hint()
            sources.add(link.source)
            by_nodes = link.source == "loop"
            if link.parent is None:
                versions = self._versions_at("", at, by_nodes)
                return Hint(versions, not versions, _author(sources))
            below, at = at, link.parent
            link = yield Address(thread, namespace, at)
        return Hint()

    def _versions_at(self, checkpoint: str, below: str, by_nodes: bool) -> tuple[str, ...]:
        """The versions of the state at a checkpoint, or of what the nodes there made of it.

        Runs that save only at their end leave no checkpoints of their steps: what their nodes made
        lies between two saved ones.
        """
        with self._lock:
            if by_nodes or self._notes == "shown":
                if checkpoint not in self._results and by_nodes:
                    place = bisect_left(self._checkpoints, below) - 1
                    between = self._checkpoints[place] if place >= 0 else ""
                    if between > checkpoint:
                        return self._candidates(between)
                elif checkpoint in self._results:
                    return self._candidates(checkpoint)
            start = self._starts.get(checkpoint)
            return () if start is None else (start,)

    def _candidates(self, checkpoint: str) -> tuple[str, ...]:
        """The versions at a checkpoint that a state may come from; of what was shown, the last."""
        tasks = self._results[checkpoint].values()
        if self._notes == "shown":
            return tuple(sorted(versions[-1] for versions in tasks))
        return tuple(sorted(version for versions in tasks for version in versions))


def _author(sources: Collection[str | None]) -> str | None:
    """Who made the checkpoints on the way, as far as it was not the graph's nodes."""
    for source, author in (("update", UPDATE), ("input", INPUT)):
        if source in sources:
            return author
    return None
