"""One memory budget for the stored versions of all threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from itertools import count
from typing import Protocol
from weakref import WeakSet

from patchkv_agents.ranges import BoolArray
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
    """Versions of one thread. The budget's lock is held in all calls.

    Attributes:
        is_reused: whether the thread came back after its first version.
    """

    is_reused: bool

    def payload_rows(self) -> dict[Payload, BoolArray]:
        """Rows of each payload that some version refers to, bool `[rows]` by payload."""

    def last_used(self) -> int:
        """Tick of the last use of any version."""

    def ages(self) -> dict[str, int]:
        """Tick of the last use of each version."""

    def pack(self) -> None:
        """Store with loss what may be."""

    def compact(self) -> None:
        """Give back rows of payloads that no version refers to."""

    def drop(self, versions: list[str]) -> None:
        """Delete versions."""


class MemoryBudget:
    """Memory that the stored versions of several threads share.

    Where they exceed it, what was used least recently goes first, in this order: rows that no
    version refers to, precision, whole versions. Of these, threads that never came back go before
    the others; the version that was used last always stays. Payload that versions share counts
    once, across threads too. Safe for several Python threads.

    Args:
        limit_bytes: of payload; `default_budget_bytes()` if left out.

    Attributes:
        lock: held while versions change.
        limit_bytes: the limit. May be changed; the next `fit` heeds it.
        ticks: numbers the uses of versions.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.lock = threading.RLock()
        self.limit_bytes = default_budget_bytes() if limit_bytes is None else limit_bytes
        self._members: WeakSet[BudgetMember] = WeakSet()
        self.ticks = count(1)

    def register(self, member: BudgetMember) -> None:
        """Count the versions of another thread too, as long as they are referred to."""
        with self.lock:
            self._members.add(member)

    @property
    def used_bytes(self) -> int:
        """Bytes of all payloads, each counted once."""
        with self.lock:
            payloads = {payload for member in self._members for payload in member.payload_rows()}
            return sum(payload.nbytes for payload in payloads)

    def fit(self) -> None:
        """Bring the payload below the limit."""
        with self.lock:
            if self.used_bytes <= self.limit_bytes:
                return
            members = sorted(
                self._members, key=lambda member: (member.is_reused, member.last_used())
            )
            if self._live_bytes() > self.limit_bytes:
                for member in members:
                    member.pack()
                    if self._live_bytes() <= self.limit_bytes:
                        break
            self._evict(members)
            for member in members:
                if self.used_bytes <= self.limit_bytes:
                    break
                member.compact()

    def _evict(self, members: list[BudgetMember]) -> None:
        """Drop versions while too much is left, down to well below the limit."""
        if self._live_bytes() <= self.limit_bytes:
            return
        order = sorted(
            (member.is_reused, used, version, number)
            for number, member in enumerate(members)
            for version, used in member.ages().items()
        )
        newest = max((entry[1] for entry in order), default=0)
        for _, used, version, number in order:
            # Not every suspend should have to copy what is kept.
            if self._live_bytes() <= self.limit_bytes * 3 // 4:
                return
            if used != newest:
                members[number].drop([version])

    def _live_bytes(self) -> int:
        """Bytes of payload once only used rows are left, roughly."""
        used: dict[Payload, BoolArray] = {}
        for member in self._members:
            for payload, rows in member.payload_rows().items():
                used[payload] = used[payload] | rows if payload in used else rows
        return live_bytes(used)


def live_bytes(used: Mapping[Payload, BoolArray]) -> int:
    """Bytes of payloads once only their used rows (bool `[rows]`) are left, roughly."""
    return sum(
        payload.nbytes * int(rows.sum()) // max(1, payload.rows) for payload, rows in used.items()
    )
