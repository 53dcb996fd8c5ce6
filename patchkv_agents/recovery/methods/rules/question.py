"""Blocks chosen by what the end of the new context attends to.

The rows of the plan run. The blocks to which those among the last prompt positions attend most, and
that are still old state, run then, and again everything that was computed behind the first of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from patchkv_agents.ranges import BoolArray, FloatArray, RowSet, ranked, within
from patchkv_agents.recovery.methods.base import AttentionRule, OldRows, RowRunner
from patchkv_agents.recovery.plan import RecoveryPlan, RowLabel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Question(AttentionRule):
    """Ranks blocks by the attention that the last prompt rows of the new context give.

    No row keeps what it saw of the old state of a chosen block, but the choice itself was made by
    rows that did.
    """

    kind: Literal["question"] = "question"

    def values(self, rows: OldRows) -> FloatArray:
        """Nothing: they are known only once the question has run."""
        return np.zeros(rows.tokens, dtype=np.float32)

    def reserved(self, rows: OldRows, candidates: BoolArray, block_size: int) -> int:
        """All of its blocks: which ones is not known yet."""
        return self.blocks(int(rows.suffix.sum()), block_size)

    def late_rows(
        self, plan: RecoveryPlan, scores: FloatArray, *, block_size: int, room: int
    ) -> BoolArray:
        """The restored suffix rows in the blocks to which the question pays most attention.

        Args:
            plan: as it was made for this rule.
            scores: attention that the rows of the question gave to each token of the new version,
                float32 `[tokens]`.
            block_size: in tokens.
            room: most rows.
        """
        candidates = plan.suffix & plan.kept
        blocks = self.blocks(int(plan.suffix.sum()), block_size)
        return within(ranked(scores, candidates, block_size)[:blocks], candidates, block_size, room)

    def finish(
        self,
        plan: RecoveryPlan,
        logits: torch.Tensor,
        runner: RowRunner,
        *,
        block_size: int,
        room: int,
    ) -> tuple[torch.Tensor, RecoveryPlan]:
        """Run the chosen blocks, and again what is behind them."""
        chosen = self.late_rows(plan, runner.attention(), block_size=block_size, room=room)
        if not chosen.any():
            return logits, plan
        done = plan.extended(chosen, RowLabel.ATTENTION)
        rows = ~done.kept
        rows[: int(np.argmax(chosen))] = False
        logits = runner.run(RowSet.of_mask(rows), again=True)
        return logits, replace(done, run_twice=int(np.count_nonzero(rows & ~plan.kept)))
