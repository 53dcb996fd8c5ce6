"""Carrying out a recovery plan: stored rows into a cache, the others through the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from patchkv_agents.checkpoint import Checkpoint
from patchkv_agents.engine.adapter import ModelAdapter, RowCache
from patchkv_agents.engine.blend import blend_rows
from patchkv_agents.engine.capture import PROMPT_QUERIES, AttentionCapture, sampled_layers
from patchkv_agents.ranges import BoolArray, IntArray
from patchkv_agents.recovery.plan import RecoveryPlan
from patchkv_agents.recovery.policy import BlendPolicy
from patchkv_agents.recovery.restore import Restoration
from patchkv_kernels import Rope


@dataclass(frozen=True, slots=True, eq=False)
class Executed:
    """A plan that was carried out.

    Attributes:
        logits: of the last token, `[vocab]`.
        plan: as carried out; with `blend`, rows were chosen on the way.
        capture: has the attention of the last prompt rows, and takes that of what is decoded.
        restoration: what was restored, and what that cost.
    """

    logits: torch.Tensor
    plan: RecoveryPlan
    capture: AttentionCapture
    restoration: Restoration


def execute(
    adapter: ModelAdapter,
    rope: Rope,
    token_ids: IntArray,
    plan: RecoveryPlan,
    cache: RowCache,
    *,
    old: Checkpoint,
    in_place: BoolArray,
    blend: BlendPolicy | None,
    arrived: Callable[[int], None] | None,
) -> Executed:
    """Fill the cache with the rows of `token_ids`.

    Args:
        adapter, rope: of the model.
        token_ids: int64 `[tokens]`.
        plan: what is kept and computed.
        cache: changed in place.
        old: of the version from which rows are kept; those that are not in place are stored.
        in_place: rows that the cache has already, bool `[tokens]`.
        blend: chooses further rows to compute while they run, or None.
        arrived: waits until the first n layers of stored rows are in memory; None if all are.
    """
    tokens = len(token_ids)
    with adapter.turns:  # several of them at once would be slower than one by one
        stored = old.stored_at(np.where(in_place, -1, plan.source))
        restoration = Restoration(stored, cache.shards, rope, arrived)
    capture = AttentionCapture(
        layers=sampled_layers(adapter.scored_layers),
        prior=np.where(plan.aligned >= 0, old.scores[plan.aligned], 0.0) if len(old) else None,
    )
    capture.announce(max(0, tokens - PROMPT_QUERIES), tokens)
    ready = restoration.ready
    if blend is None:
        logits = adapter.forward_rows(token_ids, plan.rows, cache, capture=capture, ready=ready)
    else:
        logits, plan = blend_rows(
            adapter, token_ids, plan, blend, cache, capture=capture, ready=ready
        )
    return Executed(logits, plan, capture, restoration)
