"""Choosing rows while they run, as CacheBlend does (arXiv 2405.16444, sections 4.2 and 4.3).

First, every row behind the exact prefix runs through the layers in front of the check layer, and
through that layer up to its keys and values. These are compared with the restored ones and take
their places. Then the chosen rows run, from the check layer on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from patchkv_agents.backends.transformers.adapter import MAX_ROWS, ModelAdapter, RowCache
from patchkv_agents.backends.transformers.capture import AttentionCapture
from patchkv_agents.backends.transformers.layerwise import decoder_layers, inputs_of, starting_at
from patchkv_agents.backends.transformers.row_attention import ActiveRows, LayerReached
from patchkv_agents.errors import InputError
from patchkv_agents.ranges import BoolArray, IntArray, RowSet
from patchkv_agents.recovery.plan import RecoveryPlan, RowLabel
from patchkv_agents.recovery.policy import BlendMask, BlendPolicy, BlendScore


@torch.inference_mode()
def blend_rows(
    adapter: ModelAdapter,
    token_ids: IntArray,
    plan: RecoveryPlan,
    policy: BlendPolicy,
    cache: RowCache,
    *,
    capture: AttentionCapture,
    ready: Callable[[int], None],
) -> tuple[torch.Tensor, RecoveryPlan]:
    """Compute the rows of `plan` and those whose state deviates most from the restored.

    Up to the check layer, the cache holds fresh keys and values of all rows afterwards: they are at
    hand, and the authors' code keeps them too. The checkpoint refers to the restored ones.

    Args:
        adapter, token_ids, cache, ready: as for `ModelAdapter.forward_rows`.
        plan: says what is kept and computed at least.
        policy: how many rows are chosen, and how.
        capture: collects attention mass, but not of rows that see later keys.

    Returns:
        Logits of the last row, `[vocab]`, and the plan as carried out.

    Raises:
        InputError: the model has no such check layer.
        UnsupportedModelError: the model has no plain list of layers.
    """
    check = policy.check_layer
    if check >= adapter.layers:
        raise InputError(
            f"check_layer is {check}, but the model has {adapter.layers} layers: use a smaller one"
        )
    behind = ~plan.kept
    behind[plan.prefix :] = True
    scored = (plan.labels == RowLabel.RESTORED) & behind
    if not scored.any():
        logits = adapter.forward_rows(token_ids, plan.rows, cache, capture=capture, ready=ready)
        return logits, plan

    layers = decoder_layers(adapter.model)
    deviation: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    for chunk in RowSet.of_mask(behind).chunks(MAX_ROWS):
        score = _Deviation(chunk, cache, policy)
        active = ActiveRows(chunk, capture, ready, fresh=score, last_layer=check)
        # Hooks are on the model that others use too.
        with adapter.lock, inputs_of(layers[check]) as collected, suppress(LayerReached):
            adapter.forward_chunk(token_ids, active, cache)
        inputs += collected
        deviation.append(score.rows)
    chosen = _largest(torch.cat(deviation), behind, scored, policy.ratio)

    computed = ~plan.kept | chosen
    rows = RowSet.of_mask(computed)
    seen_as = None
    if policy.mask is BlendMask.BOTTOM_RIGHT:
        bottom_right = RowSet.of_range(len(token_ids) - len(rows), len(token_ids))
        seen_as = None if bottom_right == rows else bottom_right
    packed = torch.from_numpy(np.flatnonzero(computed[behind]))
    hidden = torch.cat(inputs, dim=1)
    hidden = hidden[:, packed.to(hidden.device)]
    offset = 0
    # Rows that see later ones run at once: in each layer the others have to be in place.
    for chunk in rows.chunks(len(rows) if seen_as else MAX_ROWS):
        active = ActiveRows(chunk, None if seen_as else capture, ready, seen_as=seen_as)
        with adapter.lock, starting_at(layers, check, hidden[:, offset : offset + len(chunk)]):
            logits = adapter.forward_chunk(token_ids, active, cache)
        offset += len(chunk)
    done = plan.blended(chosen, full_layers=check / adapter.layers, sees_later=seen_as is not None)
    return logits, done


class _Deviation:
    """Squared difference of fresh and restored rows, summed over heads and channels.

    Attributes:
        rows: once the check layer has run, float32 `[rows]`.
    """

    def __init__(self, chunk: RowSet, cache: RowCache, policy: BlendPolicy) -> None:
        self.rows = torch.empty(0)
        self._chunk, self._cache, self._policy = chunk, cache, policy

    def __call__(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Compare what a layer computed, `[1, kv_heads, rows, head_dim]`."""
        if layer != self._policy.check_layer:
            return
        old_keys, old_values = self._cache.layer(layer)
        by_key = self._policy.score is BlendScore.KEY
        fresh, old = (keys[0], old_keys) if by_key else (values[0], old_values)
        packed = torch.cat([old[:, start:stop] for start, stop in self._chunk.ranges], dim=1)
        self.rows = (fresh.float() - packed.float()).square().sum((0, 2))


def _largest(
    deviation: torch.Tensor, behind: BoolArray, scored: BoolArray, ratio: float
) -> BoolArray:
    """The share `ratio` of the scored tokens that deviate most, bool `[tokens]`.

    Args:
        deviation: of the tokens in `behind`, `[rows]`.
        behind, scored: bool `[tokens]`; every scored token is in `behind`.
        ratio: how many, rounded down.
    """
    candidates = torch.from_numpy(np.flatnonzero(scored[behind])).to(deviation.device)
    best = deviation[candidates].topk(int(ratio * len(candidates))).indices.cpu().numpy()
    chosen = np.zeros(len(scored), dtype=bool)
    chosen[np.flatnonzero(scored)[best]] = True
    return chosen
