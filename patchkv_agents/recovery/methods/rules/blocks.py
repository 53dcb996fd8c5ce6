"""Whole blocks that received most attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from patchkv_agents.ranges import FloatArray
from patchkv_agents.recovery.methods.base import AttentionRule, OldRows


@dataclass(frozen=True, slots=True)
class Blocks(AttentionRule):
    """Ranks blocks by the largest attention that a token in them received."""

    kind: Literal["blocks"] = "blocks"

    def values(self, rows: OldRows) -> FloatArray:
        """The attention that each token received in the old version."""
        return rows.scores[rows.old]
