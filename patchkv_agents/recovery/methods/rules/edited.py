"""Whole blocks that gave most attention to what was edited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from patchkv_agents.ranges import FloatArray
from patchkv_agents.recovery.methods.base import AttentionRule, OldRows


@dataclass(frozen=True, slots=True)
class Edited(AttentionRule):
    """Ranks blocks by the attention that they gave to the edits, directly and through others.

    Without a map of that, by the attention that they received.
    """

    kind: Literal["edited"] = "edited"

    @property
    def needs_map(self) -> bool:
        """True."""
        return True

    def values(self, rows: OldRows) -> FloatArray:
        """The attention of each token's block to the edits."""
        mass = rows.edit_mass()
        return rows.scores[rows.old] if mass is None else mass
