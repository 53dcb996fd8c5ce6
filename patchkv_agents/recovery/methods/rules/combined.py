"""Whole blocks by both kinds of attention: given to what was edited, and received."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from patchkv_agents.ranges import FloatArray
from patchkv_agents.recovery.methods.base import AttentionRule, OldRows


@dataclass(frozen=True, slots=True)
class Combined(AttentionRule):
    """Ranks blocks by attention to the edits times attention received."""

    kind: Literal["combined"] = "combined"

    @property
    def needs_map(self) -> bool:
        """True."""
        return True

    def values(self, rows: OldRows) -> FloatArray:
        """The product; without a map, the attention received."""
        mass, scores = rows.edit_mass(), rows.scores[rows.old]
        return scores if mass is None else mass * scores
