"""Which rows of a thread's states a version may take over: those that its own branch computed.

Versions of one thread can be branches of each other: a turn that is generated again, a state that
was gone back to, calls side by side. A row that was restored, or computed while it saw restored
rows, depends on what its branch had done before. In another branch it would be somebody else's
approximation, so it is used only by versions that come from the one which computed it.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from patchkv_agents.ranges import BoolArray, IntArray
from patchkv_agents.recovery.plan import RecoveryPlan

MAX_VERSIONS = 64
"""Versions whose rows are attributed; all rows of an older one count as computed by itself."""


class RowVersions:
    """The version that computed each row, for the newest states of a thread."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # by version
        self._names: dict[int, str] = {}  # by number
        self._rows: dict[str, IntArray] = {}  # by state's version, the number of each row
        self._next = 0

    def __len__(self) -> int:
        """Versions to which rows are attributed."""
        return len(self._numbers)

    def copy(self) -> RowVersions:
        """The same so far, for a fork."""
        other = RowVersions()
        other._numbers, other._names = dict(self._numbers), dict(self._names)
        other._rows, other._next = dict(self._rows), self._next
        return other

    def note(self, version: str, plan: RecoveryPlan, donor: str | None) -> None:
        """Record how the state of a version was made.

        Args:
            version: its id. Rows that are appended later are its own.
            plan: as carried out.
            donor: the version from which rows were kept; None if none were.
        """
        number = self._number(version)
        rows = np.full(len(plan.labels), number)
        if donor is not None:
            source = plan.source[plan.kept]
            rows[plan.kept] = self._of(donor, int(source.max()) + 1)[source]
        before = self._rows.pop(version, None)
        if before is not None:  # state of the earlier time may still be stored under this name
            same = min(len(before), len(rows))
            rows[:same][before[:same] != rows[:same]] = number
        self._rows[version] = rows
        if len(self._rows) > MAX_VERSIONS:
            del self._rows[next(iter(self._rows))]
        if len(self._numbers) > 4 * MAX_VERSIONS:
            self._prune()

    def own(self, version: str, tokens: int, branch: Set[str]) -> BoolArray:
        """The rows of a version's state that versions of a branch computed, bool `[tokens]`.

        Args:
            version: whose state it is.
            tokens: of that state.
            branch: ids of its versions.
        """
        rows = self._of(version, tokens)
        # A number without a name is of this very version, which nothing is recorded of.
        numbers = [n for n in np.unique(rows).tolist() if self._names.get(n, version) in branch]
        return np.isin(rows, numbers)

    def _prune(self) -> None:
        """Drop the numbers of versions of whose rows none is left."""
        used = np.unique(np.concatenate(list(self._rows.values())))
        self._names = {number: self._names[number] for number in used.tolist()}
        self._numbers = {name: number for number, name in self._names.items()}

    def _number(self, version: str) -> int:
        if version not in self._numbers:
            self._numbers[version] = self._next
            self._names[self._next] = version
            self._next += 1
        return self._numbers[version]

    def _of(self, version: str, tokens: int) -> IntArray:
        """Numbers of a state of this version, which may be longer or shorter than recorded."""
        recorded = self._rows.get(version, np.empty(0, dtype=np.int64))[:tokens]
        own = np.full(tokens - len(recorded), self._numbers.get(version, -1))
        return np.concatenate([recorded, own])
