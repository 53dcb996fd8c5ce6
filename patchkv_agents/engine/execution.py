"""Carrying out a recovery plan: stored rows into a cache, the others through the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from patchkv_agents.backends.transformers.adapter import ModelAdapter, RowCache
from patchkv_agents.backends.transformers.capture import (
    PROMPT_QUERIES,
    AttentionCapture,
    MapCapture,
    map_layers,
    sampled_layers,
)
from patchkv_agents.checkpoint import Checkpoint
from patchkv_agents.engine.model_rows import ModelRows
from patchkv_agents.engine.stopwatch import Stopwatch
from patchkv_agents.ranges import IntArray
from patchkv_agents.recovery.plan import RecoveryPlan
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.restore import Restoration
from patchkv_kernels import Rope


@dataclass(frozen=True, slots=True, eq=False)
class Executed:
    """A plan that was carried out.

    Attributes:
        logits: of the last token, `[vocab]`.
        plan: as carried out; rows may have been chosen on the way.
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
    policy: RecoveryPolicy,
    cache: RowCache,
    *,
    old: Checkpoint,
    source: IntArray,
    arrived: Callable[[int], None] | None,
    watch: Stopwatch,
) -> Executed:
    """Fill the cache with the rows of `token_ids`.

    Args:
        adapter, rope: of the model.
        token_ids: int64 `[tokens]`.
        plan: what is kept and computed.
        policy: runs them; may choose further rows meanwhile.
        cache: changed in place.
        old: of the version from which rows are kept.
        source: its stored rows to be written into the cache, by old position; -1 where there is
            none, or the cache has it already; int64 `[tokens]`.
        arrived: waits until the first n layers of stored rows are in memory; None if all are.
        watch: gets the times of restoring and recomputing.
    """
    tokens = len(token_ids)
    with adapter.lock:  # several of them at once would be slower than one by one
        restoration = Restoration(old.stored_at(source), cache.shards, rope, arrived)
    watch.mark("restore")

    def ready(layer: int) -> None:
        watch.mark("recompute")
        restoration.ready(layer)
        watch.mark("restore")

    try:
        capture = AttentionCapture(
            layers=sampled_layers(adapter.scored_layers),
            prior=np.where(plan.aligned >= 0, old.scores[plan.aligned], 0.0) if len(old) else None,
            block_map=_map_capture(adapter, plan, old, policy),
        )
        capture.announce(max(0, tokens - PROMPT_QUERIES), tokens)
        rows = ModelRows(adapter, token_ids, cache, capture=capture, ready=ready)
        logits, plan = policy.method.run(plan, rows)
    except BaseException:
        restoration.stop()
        raise
    watch.mark("recompute")
    return Executed(logits, plan, capture, restoration)


def _map_capture(
    adapter: ModelAdapter, plan: RecoveryPlan, old: Checkpoint, policy: RecoveryPolicy
) -> MapCapture | None:
    """Collects the block map if the policy needs one; else what there is of it is carried over."""
    layers = map_layers(adapter.scored_layers) if policy.method.needs_map else frozenset()
    if not layers and not old.block_map:
        return None
    return MapCapture(
        layers=layers, prior=None if old.block_map is None else old.block_map.moved(plan.aligned)
    )
