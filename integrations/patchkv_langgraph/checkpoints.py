"""Links between a graph's checkpoints, as its checkpointer has them, for searches of lineage."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from threading import Lock
from typing import Any, TypeVar

from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple

from patchkv_agents.context.lineage.checkpoints import Address, Link, Search

MAX_LINKS = 10_000
"""Checkpoints whose links a tracked saver keeps in memory."""
T = TypeVar("T")


class LinkCache:
    """Links between checkpoints that one saver has seen. Safe to use from several threads."""

    def __init__(self) -> None:
        self._links: OrderedDict[Address, Link] = OrderedDict()
        self._newest: OrderedDict[tuple[str, str], Link] = OrderedDict()
        self._lock = Lock()

    def note(self, thread: str, namespace: str, link: Link, *, is_newest: bool) -> None:
        """Remember a checkpoint that was written or read."""
        with self._lock:
            self._links[Address(thread, namespace, link.checkpoint)] = link
            if is_newest:
                self._newest[thread, namespace] = link
            for cache in (self._links, self._newest):
                if len(cache) > MAX_LINKS:
                    cache.popitem(last=False)

    def get(self, address: Address) -> Link | None:
        """The link of a checkpoint, or of the newest one."""
        with self._lock:
            if address.checkpoint is None:
                return self._newest.get((address.thread, address.namespace))
            return self._links.get(address)

    def forget(self, thread: str) -> None:
        """Drop the links of a thread."""
        with self._lock:
            for address in [each for each in self._links if each.thread == thread]:
                del self._links[address]
            for key in [key for key in self._newest if key[0] == thread]:
                del self._newest[key]


def link_of(saved: CheckpointTuple) -> Link:
    """The link of a checkpoint that a saver has returned."""
    before = (saved.parent_config or {}).get("configurable", {})
    return Link(saved.checkpoint["id"], before.get("checkpoint_id"), saved.metadata.get("source"))


def stored_link(saver: BaseCheckpointSaver[Any] | None, address: Address) -> Link | None:
    """The link of a checkpoint that a saver has stored.

    A saver that works in an event loop is not asked: its answer may need a thread of the loop's
    executor, and this may be the last one.

    Returns:
        None if it has none, or is not asked.
    """
    loop = getattr(saver, "loop", None)
    if saver is None or (isinstance(loop, asyncio.AbstractEventLoop) and loop.is_running()):
        return None
    try:
        saved = saver.get_tuple(_config(address))
    except NotImplementedError:
        return None
    return saved and link_of(saved)


async def astored_link(saver: BaseCheckpointSaver[Any] | None, address: Address) -> Link | None:
    """As `stored_link`, asked asynchronously."""
    if saver is None:
        return None
    try:
        saved = await saver.aget_tuple(_config(address))
    except NotImplementedError:  # it can only be asked synchronously
        return await asyncio.to_thread(stored_link, saver, address)
    return saved and link_of(saved)


def asking(search: Search[T], saver: BaseCheckpointSaver[Any] | None) -> T:
    """Run a search; the saver is asked in this thread."""
    done, step = _advanced(search, None)
    while not done:
        link = _cached(saver, step) or stored_link(saver, step)
        done, step = _advanced(search, link)
    return step  # type: ignore[no-any-return]


async def aasking(search: Search[T], saver: BaseCheckpointSaver[Any] | None) -> T:
    """Run a search: the saver is asked asynchronously, the rest runs in another thread."""
    done, step = await asyncio.to_thread(_advanced, search, None)
    while not done:
        link = _cached(saver, step) or await astored_link(saver, step)
        done, step = await asyncio.to_thread(_advanced, search, link)
    return step  # type: ignore[no-any-return]


def _advanced(search: Search[Any], answer: Link | None) -> tuple[bool, Any]:
    """Whether the search is through, and what it returned or asks for."""
    try:
        return False, search.send(answer)
    except StopIteration as end:
        return True, end.value


def _cached(saver: Any, address: Address) -> Link | None:
    links = getattr(saver, "links", None)
    return links.get(address) if isinstance(links, LinkCache) else None


def _config(address: Address) -> Any:
    configurable = {"thread_id": address.thread, "checkpoint_ns": address.namespace}
    if address.checkpoint is not None:
        configurable["checkpoint_id"] = address.checkpoint
    return {"configurable": configurable}
