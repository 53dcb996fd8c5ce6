"""No scattered rows: the window grows by as many rows as `Blocks` would take, tail included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from patchkv_agents.ranges import FloatArray, IntArray, nearest_tokens
from patchkv_agents.recovery.methods.base import AttentionRule, OldRows, Repair


@dataclass(frozen=True, slots=True)
class Contiguous(AttentionRule):
    """Puts all rows right behind the edits; of the tail, the last token stays."""

    fraction: float = 0.0
    kind: Literal["contiguous"] = "contiguous"

    def values(self, rows: OldRows) -> FloatArray:
        """The attention received, as `Blocks` has it: decides how many rows there are."""
        return rows.scores[rows.old]

    def arrange(
        self, rows: OldRows, repair: Repair, distances: IntArray, block_size: int
    ) -> Repair:
        """As many rows of the suffix, the last token and those nearest behind the edits."""
        count = int((repair.window | repair.tail | repair.attention).sum())
        others, tail = rows.suffix.copy(), rows.none()
        others[-1], tail[-1] = False, rows.suffix[-1]
        window = nearest_tokens(distances, others, block_size, count - int(tail.sum()))
        return Repair(window, tail, rows.none())
