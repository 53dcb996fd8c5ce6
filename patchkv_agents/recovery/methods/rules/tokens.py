"""The tokens that received most attention, grown to whole blocks: the published rule."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np

from patchkv_agents.ranges import BoolArray, FloatArray, largest, ranked, within
from patchkv_agents.recovery.methods.base import AttentionRule, OldRows


@dataclass(frozen=True, slots=True)
class Tokens(AttentionRule):
    """Takes the share of tokens with the largest scores, and the rest of their blocks."""

    kind: Literal["tokens"] = "tokens"

    def values(self, rows: OldRows) -> FloatArray:
        """The attention that each token received in the old version."""
        return rows.scores[rows.old]

    def choose(
        self, rows: OldRows, candidates: BoolArray, block_size: int, *, blocks: int, room: int
    ) -> BoolArray:
        """The blocks of the chosen tokens, which may be as many as these."""
        best = ceil(self.fraction * int(rows.suffix.sum()))
        if not best:
            return np.zeros(rows.tokens, dtype=bool)
        values = largest(self.values(rows), candidates, best)
        return within(ranked(values, candidates, block_size)[:best], candidates, block_size, room)
