"""Carrying out a recovery plan: stored rows into a cache, the others through the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from patchkv_agents.backends.transformers.adapter import MAX_ROWS, ModelAdapter, RowCache
from patchkv_agents.backends.transformers.capture import (
    PROMPT_QUERIES,
    AttentionCapture,
    MapCapture,
    map_layers,
    sampled_layers,
)
from patchkv_agents.backends.transformers.layerwise import decoder_layers, inputs_of, starting_at
from patchkv_agents.backends.transformers.row_attention import ActiveRows, LayerReached
from patchkv_agents.checkpoint import Checkpoint
from patchkv_agents.engine.stopwatch import Stopwatch
from patchkv_agents.ranges import IntArray, RowSet
from patchkv_agents.recovery.plan import RecoveryPlan
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.restore import Restoration
from patchkv_kernels import Rope

Compare = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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


class ModelRows:
    """Runs rows for a method (see `patchkv_agents.recovery.methods.RowRunner`).

    Args:
        adapter: of the model.
        token_ids: of the context, int64 `[tokens]`.
        cache: changed in place.
        capture: collects attention mass.
        ready: called with the index of each layer before anything of it is read from the cache.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        token_ids: IntArray,
        cache: RowCache,
        *,
        capture: AttentionCapture,
        ready: Callable[[int], None],
    ) -> None:
        self._adapter, self._token_ids, self._cache = adapter, token_ids, cache
        self._capture, self._ready = capture, ready

    @property
    def layers(self) -> int:
        """Number of the model's layers."""
        return self._adapter.layers

    def run(self, rows: RowSet, *, again: bool = False) -> torch.Tensor:
        """See `RowRunner.run`."""
        capture = None if again else self._capture
        return self._adapter.forward_rows(
            self._token_ids, rows, self._cache, capture=capture, ready=self._ready
        )

    def attention(self) -> npt.NDArray[np.float32]:
        """See `RowRunner.attention`."""
        return self._capture.fresh_scores(len(self._token_ids))

    @torch.inference_mode()
    def run_to_layer(
        self, rows: RowSet, layer: int, compare: Compare
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RowRunner.run_to_layer`."""
        layers = decoder_layers(self._adapter.model)
        inputs: list[torch.Tensor] = []
        figures: list[torch.Tensor] = []
        for chunk in rows.chunks(MAX_ROWS):
            comparison = _Comparison(chunk, self._cache, layer, compare)
            active = ActiveRows(
                chunk, self._capture, self._ready, fresh=comparison, last_layer=layer
            )
            # Hooks are on the model that others use too.
            with (
                self._adapter.lock,
                inputs_of(layers[layer]) as collected,
                suppress(LayerReached),
            ):
                self._adapter.forward_chunk(self._token_ids, active, self._cache)
            inputs += collected
            figures.append(comparison.figures)
        return torch.cat(inputs, dim=1), torch.cat(figures)

    @torch.inference_mode()
    def run_from_layer(
        self, rows: RowSet, layer: int, hidden: torch.Tensor, *, seen_as: RowSet | None
    ) -> torch.Tensor:
        """See `RowRunner.run_from_layer`."""
        layers = decoder_layers(self._adapter.model)
        logits = torch.empty(0)
        offset = 0
        # Rows that see later ones run at once: in each layer the others have to be in place.
        for chunk in rows.chunks(len(rows) if seen_as else MAX_ROWS):
            capture = None if seen_as else self._capture
            active = ActiveRows(chunk, capture, self._ready, seen_as=seen_as)
            part = hidden[:, offset : offset + len(chunk)]
            with self._adapter.lock, starting_at(layers, layer, part):
                logits = self._adapter.forward_chunk(self._token_ids, active, self._cache)
            offset += len(chunk)
        return logits


class _Comparison:
    """Compares the fresh rows of one layer with those that they replace.

    Attributes:
        figures: once the layer has run, `[rows]`.
    """

    def __init__(self, chunk: RowSet, cache: RowCache, layer: int, compare: Compare) -> None:
        self.figures = torch.empty(0)
        self._chunk, self._cache, self._layer, self._compare = chunk, cache, layer, compare

    def __call__(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Compare what a layer computed, `[1, kv_heads, rows, head_dim]`."""
        if layer != self._layer:
            return
        old = [
            torch.cat([rows[:, start:stop] for start, stop in self._chunk.ranges], dim=1)
            for rows in self._cache.layer(layer)
        ]
        self.figures = self._compare(keys[0], values[0], *old)
