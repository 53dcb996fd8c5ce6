"""One memory budget for the stored versions of all threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import NamedTuple, Protocol
from weakref import WeakSet

import numpy as np

from patchkv_agents.checkpoint.extents import Extent
from patchkv_agents.ranges import BoolArray, IntArray
from patchkv_kernels.payload import Payload

MIN_DEFAULT_BYTES = 2 * 2**30


def default_budget_bytes() -> int:
    """A quarter of this machine's memory, and 2 GiB at least."""
    try:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not known on every platform
        memory_bytes = 0
    return max(MIN_DEFAULT_BYTES, memory_bytes // 4)


class BudgetMember(Protocol):
    """Versions of one thread. The budget's lock is held in all calls but `payload_rows`.

    Attributes:
        is_reused: whether the thread came back after its first version.
    """

    is_reused: bool

    def payload_rows(self) -> Mapping[Payload, BoolArray]:
        """Rows of each payload that some version refers to, bool `[rows]` by payload."""

    def entries(self) -> list[BudgetEntry]:
        """The versions, least recently used first."""

    def pack(self) -> None:
        """Store with loss what may be."""

    def compact(self) -> None:
        """Give back rows of payloads that no version refers to."""

    def drop(self, versions: list[str]) -> None:
        """Delete versions."""


class BudgetEntry(NamedTuple):
    """One version: its name, the tick of its last use, and its stored rows."""

    version: str
    used: int
    extents: tuple[Extent, ...]


class MemoryBudget:
    """Memory that the stored versions of several threads share.

    Where they exceed it, what was used least recently goes first, in this order: rows that no
    version refers to, precision, whole versions. Of these, threads that never came back go before
    the others; the version that was used last always stays. Payload that versions share counts
    once, across threads too. Safe for several Python threads.

    Args:
        limit_bytes: of payload; `default_budget_bytes()` if left out.

    Attributes:
        lock: held while versions change, which may take long. Reading needs no lock.
        limit_bytes: the limit. May be changed; the next `fit` heeds it.
        ticks: numbers the uses of versions.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.lock = threading.RLock()
        self.limit_bytes = default_budget_bytes() if limit_bytes is None else limit_bytes
        self._members: WeakSet[BudgetMember] = WeakSet()
        self._members_lock = threading.Lock()
        self.ticks = count(1)

    def register(self, member: BudgetMember) -> None:
        """Count the versions of another thread too, as long as they are referred to."""
        with self._members_lock:
            self._members.add(member)

    @property
    def used_bytes(self) -> int:
        """Bytes of all payloads, each counted once."""
        payloads = {payload for member in self._listed() for payload in member.payload_rows()}
        return sum(payload.nbytes for payload in payloads)

    def fit(self) -> None:
        """Bring the payload below the limit, in time linear in the number of versions."""
        with self.lock:
            if self.used_bytes <= self.limit_bytes:
                return
            entries = {member: member.entries() for member in self._listed()}
            members = sorted(entries, key=lambda member: _age(member, entries[member]))
            usage = RowUsage()
            for member in members:
                usage.add(entries[member])
            for member in members:
                if usage.live_bytes <= self.limit_bytes:
                    break
                self._change(member, member.pack, usage)
            self._evict(members, usage)
            for member in members:
                if usage.payload_bytes <= self.limit_bytes:
                    break
                self._change(member, member.compact, usage)

    def _listed(self) -> list[BudgetMember]:
        with self._members_lock:
            return list(self._members)

    @staticmethod
    def _change(member: BudgetMember, change: Callable[[], None], usage: RowUsage) -> None:
        """Let a member store its versions in another form."""
        usage.remove(member.entries())
        try:
            change()
        finally:
            usage.add(member.entries())

    def _evict(self, members: list[BudgetMember], usage: RowUsage) -> None:
        """Drop versions while too much is left, down to well below the limit."""
        if usage.live_bytes <= self.limit_bytes:
            return
        order = sorted(
            (member.is_reused, entry.used, entry.version, number, entry)
            for number, member in enumerate(members)
            for entry in member.entries()
        )
        newest = max((used for _, used, *_ in order), default=0)
        evicted: dict[int, list[str]] = {}
        for _, used, version, number, entry in order:
            # Not every suspend should have to copy what is kept.
            if usage.live_bytes <= self.limit_bytes * 3 // 4:
                break
            if used != newest:
                usage.remove([entry])
                evicted.setdefault(number, []).append(version)
        for number, versions in evicted.items():
            members[number].drop(versions)


def _age(member: BudgetMember, entries: list[BudgetEntry]) -> tuple[bool, int]:
    """Orders members: those that are to give up memory first."""
    return member.is_reused, entries[-1].used if entries else 0


class RowUsage:
    """How many versions refer to each row of each payload, kept up to date as versions change.

    Attributes:
        live_bytes: bytes of the payloads once only rows in use are left, roughly.
        payload_bytes: bytes of the payloads that have rows in use.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.payload_bytes = 0
        self._counts: dict[Payload, IntArray] = {}

    def add(self, entries: Iterable[BudgetEntry]) -> None:
        """Count the rows of some versions."""
        for entry in entries:
            self._count(entry.extents, 1)

    def remove(self, entries: Iterable[BudgetEntry]) -> None:
        """Count the rows of some versions no longer."""
        for entry in entries:
            self._count(entry.extents, -1)

    def _count(self, extents: Iterable[Extent], step: int) -> None:
        by_payload: dict[Payload, list[Extent]] = {}
        for extent in extents:
            by_payload.setdefault(extent.payload, []).append(extent)
        for payload, parts in by_payload.items():
            counts = self._counts.setdefault(payload, np.zeros(payload.rows, dtype=np.int64))
            self._tally(payload, counts, -1)
            for part in parts:
                counts[part.row : part.row + part.length] += step
            self._tally(payload, counts, 1)

    def _tally(self, payload: Payload, counts: IntArray, sign: int) -> None:
        rows = int(np.count_nonzero(counts))
        self.live_bytes += sign * (payload.nbytes * rows // max(1, payload.rows))
        self.payload_bytes += sign * (payload.nbytes if rows else 0)


def live_bytes(used: Mapping[Payload, BoolArray]) -> int:
    """Bytes of payloads once only their used rows (bool `[rows]`) are left, roughly."""
    return sum(
        payload.nbytes * int(rows.sum()) // max(1, payload.rows) for payload, rows in used.items()
    )
