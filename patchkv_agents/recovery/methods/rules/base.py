"""What an attention rule is: which rows are recomputed beside window and tail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from patchkv_agents.errors import InputError
from patchkv_agents.ranges import BoolArray, IntArray
from patchkv_agents.recovery.methods.base import OldRows, Repair, RowRunner
from patchkv_agents.recovery.plan import RecoveryPlan
from patchkv_agents.recovery.ranking import FloatArray, ranked, within

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionRule(ABC):
    """Base of the rules: whole blocks, ranked by the largest value of a token in them.

    Attributes:
        fraction: share of the suffix that may be recomputed by the rule (kappa).

    Raises:
        InputError: the share is out of its range.
    """

    fraction: float

    @property
    @abstractmethod
    def kind(self) -> str:
        """Names the class in files."""

    @property
    def needs_map(self) -> bool:
        """Whether it asks where the blocks of the old version looked."""
        return False

    def __post_init__(self) -> None:
        if not 0.0 <= self.fraction <= 1.0:
            raise InputError(f"fraction is {self.fraction}: use 0 to 1")

    def blocks(self, suffix_tokens: int, block_size: int) -> int:
        """Most blocks that it takes."""
        return ceil(self.fraction * suffix_tokens / block_size)

    @abstractmethod
    def values(self, rows: OldRows) -> FloatArray:
        """By what tokens are ranked, float32 `[tokens]`; those at 0 are not chosen."""

    def reserved(self, rows: OldRows, candidates: BoolArray, block_size: int) -> int:
        """Blocks for which windows leave room: no more than there are to choose."""
        blocks = self.blocks(int(rows.suffix.sum()), block_size)
        return min(blocks, len(ranked(self.values(rows), candidates, block_size))) if blocks else 0

    def choose(
        self, rows: OldRows, candidates: BoolArray, block_size: int, *, blocks: int, room: int
    ) -> BoolArray:
        """The rows that are recomputed, bool `[tokens]`.

        Args:
            rows: of the new version.
            candidates: outside of window and tail, bool `[tokens]`.
            block_size: in tokens.
            blocks: most blocks, as `reserved` gave them.
            room: most rows.
        """
        if not blocks:
            return np.zeros(rows.tokens, dtype=bool)
        order = ranked(self.values(rows), candidates, block_size)[:blocks]
        return within(order, candidates, block_size, room)

    def arrange(
        self, rows: OldRows, repair: Repair, distances: IntArray, block_size: int
    ) -> Repair:
        """The repair set with its rows where the rule wants them.

        Args:
            rows: of the new version.
            repair: window, tail and the rule's own rows.
            distances: of each token from the edit in front of it, int64 `[tokens]`.
            block_size: in tokens.
        """
        return repair

    def finish(
        self,
        plan: RecoveryPlan,
        logits: torch.Tensor,
        runner: RowRunner,
        *,
        block_size: int,
        room: int,
    ) -> tuple[torch.Tensor, RecoveryPlan]:
        """Run what is chosen only once the rows of the plan have run.

        Args:
            plan: all of its rows have run.
            logits: of the last row, `[vocab]`.
            runner: has run them.
            block_size: in tokens.
            room: most rows of the suffix that may be computed beside the plan's.

        Returns:
            Logits of the last row, and the plan as carried out.
        """
        return logits, plan
