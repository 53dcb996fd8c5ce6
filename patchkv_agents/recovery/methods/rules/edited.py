"""Whole blocks that gave most attention to what was edited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from patchkv_agents.recovery.edit_mass import edit_mass
from patchkv_agents.recovery.methods.base import OldRows
from patchkv_agents.recovery.methods.rules.base import AttentionRule
from patchkv_agents.recovery.ranking import FloatArray


def edited_mass(rows: OldRows) -> FloatArray | None:
    """Attention of each token's block to the edits, float32 `[tokens]`; None without a map."""
    if rows.block_map is None or not rows.block_map.mass.any():
        return None
    return edit_mass(rows.block_map, rows.alignment)[rows.old // rows.block_map.block_size]


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
        mass = edited_mass(rows)
        return rows.scores[rows.old] if mass is None else mass
