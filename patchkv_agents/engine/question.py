"""Blocks chosen by what the end of the new context attends to.

The rows of the plan run. The blocks to which those among the last prompt positions attend most, and
that are still old state, run then, and again everything that was computed behind the first of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from patchkv_agents.backends.transformers.adapter import ModelAdapter, RowCache
from patchkv_agents.backends.transformers.capture import AttentionCapture
from patchkv_agents.ranges import IntArray, RowSet
from patchkv_agents.recovery.plan import RecoveryPlan, RowLabel
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.selection import question_blocks


def run_question_blocks(
    adapter: ModelAdapter,
    token_ids: IntArray,
    plan: RecoveryPlan,
    policy: RecoveryPolicy,
    cache: RowCache,
    *,
    logits: torch.Tensor,
    capture: AttentionCapture,
    ready: Callable[[int], None],
) -> tuple[torch.Tensor, RecoveryPlan]:
    """Compute the blocks that the last prompt rows attend to, and again what is behind them.

    No row keeps what it saw of the old state of a chosen block, but the choice itself was made by
    rows that did.

    Args:
        adapter, token_ids, cache, ready: as for `ModelAdapter.forward_rows`.
        plan: all of its rows have run.
        policy: how many blocks are chosen.
        logits: of the last row, `[vocab]`.
        capture: has the attention of those rows.

    Returns:
        Logits of the last row, `[vocab]`, and the plan as carried out.
    """
    chosen = question_blocks(plan, policy, capture.fresh_scores(len(token_ids)))
    if not chosen.any():
        return logits, plan
    done = plan.extended(chosen, RowLabel.ATTENTION)
    rows = ~done.kept
    rows[: int(np.argmax(chosen))] = False
    # Without the capture: what ran before would count twice.
    logits = adapter.forward_rows(token_ids, RowSet.of_mask(rows), cache, capture=None, ready=ready)
    return logits, replace(done, run_twice=int(np.count_nonzero(rows & ~plan.kept)))
