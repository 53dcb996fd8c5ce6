"""Windows that end where the drift of the rows just recomputed ends.

The old state of a window is in the cache when the window runs: fresh values are compared with what
they overwrite. Rows run in ascending order, each once, so the result is that of a plan that had the
final windows from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from patchkv_agents.backends.transformers.adapter import MAX_ROWS, ModelAdapter, RowCache
from patchkv_agents.backends.transformers.capture import AttentionCapture, sampled_layers
from patchkv_agents.backends.transformers.row_attention import ActiveRows
from patchkv_agents.ranges import BoolArray, IntArray, RowSet
from patchkv_agents.recovery.plan import RecoveryPlan, RowLabel
from patchkv_agents.recovery.policy import MeasuredStop, RecoveryPolicy
from patchkv_agents.recovery.selection import repair_room


def rows_to_restore(plan: RecoveryPlan, policy: RecoveryPolicy) -> IntArray:
    """Old position of each row that has to be in the cache before rows run, else -1.

    Beside the rows that are kept, those of windows whose drift is measured; int64 `[tokens]`.
    """
    if policy.stop is None:
        return plan.source
    return np.where(plan.kept | (plan.labels == RowLabel.WINDOW), plan.aligned, -1)


def measured_rows(
    adapter: ModelAdapter,
    token_ids: IntArray,
    plan: RecoveryPlan,
    policy: RecoveryPolicy,
    stop: MeasuredStop,
    cache: RowCache,
    *,
    capture: AttentionCapture,
    ready: Callable[[int], None],
) -> tuple[torch.Tensor, RecoveryPlan]:
    """Compute the rows of `plan`, and more behind each window while its end drifts too much.

    A window grows up to the next edit or the query tail, over rows that are computed for their
    attention, and within the policy's `most_repaired`. Where none was planned, none grows.

    Args:
        adapter, token_ids, cache, capture, ready: as for `ModelAdapter.forward_rows`. The rows of
            `rows_to_restore` must be in the cache or come with `ready`.
        plan: says what is kept and computed at least.
        policy, stop: how far windows may grow, and when.

    Returns:
        Logits of the last row, `[vocab]`, and the plan as carried out.
    """
    layers = sampled_layers(range(adapter.layers))
    tokens = len(token_ids)
    logits = torch.empty(0)
    position = 0
    while position < tokens:
        start, end = _next_window(plan, position)
        while position < end:
            rows, measured = ~plan.kept, plan.labels == RowLabel.WINDOW
            rows[:position] = rows[end:] = False
            measured[: max(start, end - stop.step_tokens)] = measured[end:] = False
            drifts: list[torch.Tensor] = []
            for chunk in RowSet.of_mask(rows).chunks(MAX_ROWS):
                compare = _Drift(chunk, measured, cache, layers)
                active = ActiveRows(chunk, capture, ready, fresh=compare)
                logits = adapter.forward_chunk(token_ids, active, cache)
                drifts += compare.found
            position = end
            if drifts and float(torch.cat([each.cpu() for each in drifts]).median()) > stop.drift:
                more = _extension(plan, end, start + stop.most_tokens)
                more &= np.cumsum(more) <= min(stop.step_tokens, repair_room(plan, policy))
                if more.any():
                    plan = plan.extended(more, RowLabel.WINDOW)
                    end = int(np.flatnonzero(more)[-1]) + 1
    return logits, plan


def _next_window(plan: RecoveryPlan, position: int) -> tuple[int, int]:
    """The first window behind `position`; empty, at the end, if there is none."""
    tokens = len(plan.labels)
    window = plan.labels[position:] == RowLabel.WINDOW
    if not window.any():
        return tokens, tokens
    start = position + int(np.argmax(window))
    outside = plan.labels[start:] != RowLabel.WINDOW
    return start, start + int(np.argmax(outside)) if outside.any() else tokens


def _extension(plan: RecoveryPlan, start: int, stop: int) -> BoolArray:
    """Restored rows from `start` to `stop`, or to the next edit, window or tail."""
    more: BoolArray = plan.labels == RowLabel.RESTORED
    passable = more | (plan.labels == RowLabel.ATTENTION)
    passable[:start] = True
    passable[max(start, stop) :] = False
    if not passable.all():
        more[int(np.argmin(passable)) :] = False
    more[:start] = False
    return more


class _Drift:
    """Relative L2 distance of old values from fresh ones, by row.

    Attributes:
        found: of the measured rows of the chunk, `[rows]`, for each sampled layer that has run.
    """

    def __init__(
        self, chunk: RowSet, measured: BoolArray, cache: RowCache, layers: frozenset[int]
    ) -> None:
        self.found: list[torch.Tensor] = []
        self._cache, self._layers = cache, layers
        positions = chunk.positions()
        packed = np.flatnonzero(measured[positions])
        self._packed = torch.from_numpy(packed)
        self._positions = torch.from_numpy(positions[packed])

    def __call__(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Compare what a layer computed, `[1, kv_heads, rows, head_dim]`."""
        if layer not in self._layers or not len(self._packed):
            return
        fresh = values[0, :, self._packed.to(values.device)].float()
        old = self._cache.layer(layer)[1][:, self._positions.to(values.device)].float()
        size = fresh.square().sum((0, 2)).sqrt()
        self.found.append((fresh - old).square().sum((0, 2)).sqrt() / size.clamp_min(1e-30))
