"""Which rows of a thread's states a version may take over: those that its own line made.

Versions of one thread can be branches of each other: a turn that is generated again, a state that
was gone back to, calls side by side. A row that was restored, or computed while it saw restored
rows, depends on what its branch had done before. In another branch it would be somebody else's
approximation, so it is used only by versions that come from the one which computed it.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from patchkv_agents.context import ContextHistory, ContextVersion
from patchkv_agents.errors import ContextError
from patchkv_agents.ranges import BoolArray, IntArray
from patchkv_agents.recovery.plan import RecoveryPlan

MAX_VERSIONS = 64
"""Versions of which the makers of rows are kept; of older ones, all rows count as their own."""


class Ancestors:
    """The versions that one came from, itself included.

    Remembers what it found, so that the next version of a line costs one step.
    """

    def __init__(self) -> None:
        self._of = ""
        self._found: set[str] = set()
        self._firsts: set[str] = set()

    def copy(self) -> Ancestors:
        """One that knows of the same cuts, for a fork."""
        other = Ancestors()
        other._firsts = set(self._firsts)
        return other

    def cut(self, version: str) -> None:
        """A version came from none, whatever the history says."""
        self._firsts.add(version)

    def of(self, history: ContextHistory, version: ContextVersion) -> Set[str]:
        """Ids of the version and of all that it came from. Valid until the next call."""
        if version.id != self._of:
            if version.parents != (self._of,) or version.id in self._firsts:
                self._found = set()
            pending, known = [version.id], self._found
            while pending:
                found = pending.pop()
                if found not in known:
                    known.add(found)
                    if found in self._firsts:
                        continue
                    pending += _parents(history, version if found == version.id else found)
            self._of = version.id
        return self._found


def _parents(history: ContextHistory, version: ContextVersion | str) -> tuple[str, ...]:
    if isinstance(version, ContextVersion):
        return version.parents
    try:
        return history.get(version).parents
    except ContextError:  # deleted by another process
        return ()


class RowMakers:
    """Which version computed each row of the states that a thread has."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # of versions
        self._makers: dict[str, IntArray] = {}  # by version, the number of each row's maker

    def copy(self) -> RowMakers:
        """The same so far, for a fork."""
        other = RowMakers()
        other._numbers, other._makers = dict(self._numbers), dict(self._makers)
        return other

    def note(self, version: str, plan: RecoveryPlan, donor: str | None) -> None:
        """Note how the state of a version came about.

        Args:
            version: its id. Rows that are appended later are its own.
            plan: as carried out.
            donor: the version from which rows were kept; None if none were.
        """
        makers = np.full(len(plan.labels), self._number(version))
        if donor is not None:
            source = plan.source[plan.kept]
            makers[plan.kept] = self._of(donor, int(source.max()) + 1)[source]
        before = self._makers.pop(version, None)
        if before is not None:  # state of the earlier time may still be stored under this name
            same = min(len(before), len(makers))
            makers[:same][before[:same] != makers[:same]] = self._number(version)
        self._makers[version] = makers
        if len(self._makers) > MAX_VERSIONS:
            del self._makers[next(iter(self._makers))]

    def own(self, version: str, tokens: int, line: Set[str]) -> BoolArray:
        """The rows of a version's state that versions of a line computed, bool `[tokens]`.

        Args:
            version: whose state it is.
            tokens: of that state.
            line: ids of the versions.
        """
        numbers = [number for name, number in self._numbers.items() if name in line]
        return np.isin(self._of(version, tokens), numbers)

    def _number(self, version: str) -> int:
        return self._numbers.setdefault(version, len(self._numbers))

    def _of(self, version: str, tokens: int) -> IntArray:
        """Makers of a state of this version, which may be longer or shorter than it was noted."""
        noted = self._makers.get(version, np.empty(0, dtype=np.int64))[:tokens]
        own = np.full(tokens - len(noted), self._number(version))
        return np.concatenate([noted, own])
