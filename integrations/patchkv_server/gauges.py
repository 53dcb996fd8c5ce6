"""What the server can be asked at any time: its queue, its memory, where threads are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from patchkv_agents.context import ThreadKey

Place = Literal["answering", "live", "suspended", "stored"]
"""Where a thread's KV state is: in use, in a cache, in CPU memory, or in the store alone."""


@dataclass(frozen=True, slots=True)
class QueueLengths:
    """Requests that wait for their turn, and those that are being answered."""

    waiting: int
    running: int


@dataclass(frozen=True, slots=True)
class MemoryByTier:
    """Bytes of KV state: in live caches, of suspended versions, and in the store.

    `store_bytes` is None without a store, or where it does not know.
    """

    live_bytes: int
    suspended_bytes: int
    store_bytes: int | None


class Gauges(Protocol):
    """Answers at once: it is asked from the event loop, once a second for each page.

    Each figure is that of one tenant, or of all together where none is named.
    """

    def queue(self, tenant: str | None = None) -> QueueLengths:
        """The lengths of the queue."""
        ...

    def memory(self, tenant: str | None = None) -> MemoryByTier:
        """Bytes of KV state by tier; those of the store for all tenants together only."""
        ...

    def places(self, tenant: str | None = None) -> Mapping[ThreadKey, Place]:
        """Where the state of each thread is, as far as there is some."""
        ...
