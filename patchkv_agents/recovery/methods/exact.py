"""Exact recovery: keep what precedes the first edit, recompute everything behind it.

As an exact prefix cache does, on the same engine: the same chunks, attention and restore.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from patchkv_agents.recovery.methods.base import Method, OldRows, Repair


@dataclass(frozen=True, slots=True)
class Exact(Method):
    """Lossless prefix reuse only: always the results of a full prefill.

    Attributes:
        records_map: whether the attention map of blocks is recorded, for methods that resume from
            this state and need one.
    """

    records_map: bool = False
    kind: Literal["exact"] = "exact"

    @property
    def is_exact(self) -> bool:
        """True."""
        return True

    @property
    def needs_map(self) -> bool:
        """Whether the attention map of blocks is recorded."""
        return self.records_map

    def repair(self, rows: OldRows) -> Repair:
        """Every row that is not exact."""
        return Repair(rows.restorable, rows.none(), rows.none())

    def expected_rows(self, *, new: int, suffix: int, layers: int) -> float:
        """All rows behind the exact prefix."""
        return new + suffix

    def describe(self) -> Iterator[str]:
        """One line."""
        yield "everything behind an edit is recomputed: exact"
