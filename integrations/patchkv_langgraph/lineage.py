"""Which checkpoint came from which, as far as a checkpointer tells."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Condition
from typing import Any

_MAX_LINKS = 10_000
_PATIENCE_S = 0.25


@dataclass(frozen=True, slots=True)
class Link:
    """A checkpoint's parent, and what made it: `input`, `loop`, `update` or `fork`."""

    parent: str | None
    source: str | None = None


Lookup = Callable[[str, str, str], Link | None]
"""Finds the link of a checkpoint, given thread, namespace and id."""


def stored_link(saver: Any, thread: str, namespace: str, checkpoint: str) -> Link | None:
    """What a checkpointer of LangGraph's has stored of a checkpoint.

    Returns:
        None if it has nothing, or can only be asked asynchronously.
    """
    wanted = {"thread_id": thread, "checkpoint_ns": namespace, "checkpoint_id": checkpoint}
    try:
        found = saver.get_tuple({"configurable": wanted})
    except (NotImplementedError, asyncio.InvalidStateError):
        return None
    if found is None:
        return None
    before = (found.parent_config or {}).get("configurable", {})
    return Link(before.get("checkpoint_id"), found.metadata.get("source"))


class Lineage:
    """Links between checkpoints, newest last; older ones are asked of `lookup`, where there is one.

    LangGraph saves a checkpoint while the nodes run that start from it. So the newest link may be
    on its way, and is waited for; not for long, since runs that save only at their end never tell
    it in time.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self.lookup: Lookup | None = None
        self._links: OrderedDict[tuple[str, str, str], Link] = OrderedDict()
        self._silent: set[str] = set()  # threads that were waited for in vain
        self._changed = Condition()

    def note(self, thread: str, namespace: str, checkpoint: str, link: Link) -> None:
        """Remember a checkpoint."""
        with self._changed:
            self._links[thread, namespace, checkpoint] = link
            self._silent.discard(thread)
            if len(self._links) > _MAX_LINKS:
                self._links.popitem(last=False)
            self._changed.notify_all()

    def line(self, thread: str, namespace: str, checkpoint: str) -> Iterator[tuple[str, Link]]:
        """The checkpoint and those it came from, newest first, as far as they are known."""
        self._wait_for(thread, namespace, checkpoint)
        at: str | None = checkpoint
        while at is not None:
            link = self._links.get((thread, namespace, at))
            if link is None and self.lookup is not None:
                link = self.lookup(thread, namespace, at)
            if link is None:
                return
            yield at, link
            at = link.parent

    def forget(self, thread: str) -> None:
        """Drop what is known of a thread."""
        with self._changed:
            self._silent.discard(thread)
            for key in [key for key in self._links if key[0] == thread]:
                del self._links[key]

    def _wait_for(self, thread: str, namespace: str, checkpoint: str) -> None:
        if self.lookup is None or _in_event_loop():
            return
        with self._changed:
            if thread not in self._silent and not self._changed.wait_for(
                lambda: (thread, namespace, checkpoint) in self._links, _PATIENCE_S
            ):
                self._silent.add(thread)


def _in_event_loop() -> bool:
    """Whether this thread runs an event loop, in which nothing could happen while it waits."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
