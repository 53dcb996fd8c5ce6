"""Attention mass received by each token, collected while rows run through the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from patchkv_agents.backends.transformers.attention import sink_as_key
from patchkv_agents.checkpoint.block_map import MAP_BLOCK, BlockMap
from patchkv_agents.ranges import mask_of
from patchkv_kernels import add_block_mass, add_received_mass

PROMPT_QUERIES = 32
"""The last prompt positions whose attention is collected."""
MAX_QUERIES = 64
"""Prompt positions and decode steps together."""
SAMPLED_LAYERS = 8
"""Layers that are sampled, evenly spaced."""


def sampled_layers(layers: Sequence[int]) -> frozenset[int]:
    """Up to `SAMPLED_LAYERS` of the layers, evenly spaced, the last one included."""
    count = min(SAMPLED_LAYERS, len(layers))
    return frozenset(layers[int(n)] for n in np.linspace(len(layers) - 1, 0, count).round())


class AttentionCapture:
    """Sums the softmax rows of chosen query positions over heads and sampled layers.

    Costs one `[heads, queries, tokens]` product per sampled layer; nothing is kept but the sum,
    `[tokens]`. No `output_attentions`, no eager attention.

    Args:
        layers: indices of the layers to sample; without any, all scores are zero.
        prior: scores carried over from an earlier version, `[tokens]`; they stand in for the
            prompt queries that did not run.
        block_map: collects the block-to-block attention of all rows, if given.
    """

    def __init__(
        self,
        *,
        layers: frozenset[int],
        prior: npt.NDArray[np.floating[Any]] | None,
        block_map: MapCapture | None = None,
    ) -> None:
        self._layers = layers
        # Each query passes every layer; it counts once.
        self._counting_layer = max(layers, default=-1)
        self._prior = prior
        self._block_map = block_map
        self._mass: dict[torch.device, torch.Tensor] = {}  # by the device of the layers
        self._queries: list[tuple[int, int]] = []
        self._observed = 0

    @property
    def queries(self) -> int:
        """Query positions seen or announced so far."""
        return sum(stop - start for start, stop in self._queries)

    def announce(self, start: int, stop: int) -> None:
        """Collect from the query positions `[start, stop)` as they run, up to `MAX_QUERIES`."""
        stop = min(stop, start + MAX_QUERIES - self.queries)
        if stop > start:
            self._queries.append((start, stop))

    def observe(
        self,
        layer: int,
        start: int,
        query: torch.Tensor,
        key: torch.Tensor,
        scaling: float | None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Add what the announced queries among rows `[start, start + rows)` attend to.

        Args:
            layer: layer index; only sampled layers count.
            start: position of the first row.
            query: `[heads, rows, head_dim]`.
            key: `[kv_heads, start + rows, head_dim]`.
            scaling: factor of the scores; None is `head_dim ** -0.5`.
            sinks: scores of each head that take part in the softmax, `[heads]`; block maps leave
                them out, as each row of a map is normalised.
        """
        if self._block_map is not None:
            self._block_map.observe(layer, start, query, key, scaling)
        if layer not in self._layers:
            return
        stop = start + query.shape[1]
        for first, last in self._queries:
            first, last = max(first, start), min(last, stop)
            if first < last:
                self._add(query[:, first - start : last - start], key[:, :last], scaling, sinks)
                if layer == self._counting_layer:
                    self._observed += last - first

    def _add(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        scaling: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Add the attention of rows that `key` ends with; shapes as for `add_received_mass`."""
        mass = self._mass.get(key.device)
        if mass is None:
            mass = torch.zeros(0, dtype=torch.float32, device=key.device)
        missing = key.shape[1] - len(mass)
        if missing > 0:
            mass = F.pad(mass, (0, missing))
        self._mass[key.device] = mass
        if sinks is None:
            add_received_mass(mass, query, key, scaling=scaling)
            return
        query, key, _, scaling = sink_as_key(query, key, key, sinks, scaling)
        received = torch.zeros(key.shape[1], dtype=torch.float32, device=key.device)
        add_received_mass(received, query, key, scaling=scaling)
        mass[: key.shape[1] - 1] += received[1:]

    def block_map(self, tokens: int) -> BlockMap | None:
        """The block map of the first `tokens` tokens; None if it is not collected."""
        return None if self._block_map is None else self._block_map.block_map(tokens)

    def scores(self, tokens: int) -> npt.NDArray[np.float32]:
        """Share of the mass that each of the first `tokens` tokens received, float32 `[tokens]`.

        Sums to 1, or is all zero if nothing is known. A query position has no score of its own:
        only the queries at and behind it could see it.
        """
        scores = self.fresh_scores(tokens)
        if self._prior is not None and self._observed < PROMPT_QUERIES:
            share = np.float32(self._observed / PROMPT_QUERIES)
            prior = np.zeros(tokens, dtype=np.float32)
            known = min(tokens, len(self._prior))
            prior[:known] = self._prior[:known]
            scores = _normalised(share * scores + (1 - share) * _normalised(prior))
        return scores

    def fresh_scores(self, tokens: int) -> npt.NDArray[np.float32]:
        """The same from the queries that ran alone, without what was carried over."""
        mass = np.zeros(tokens, dtype=np.float32)
        for own in self._mass.values():
            seen = min(tokens, len(own))
            mass[:seen] += own[:seen].cpu().numpy()
        mass[mask_of(self._queries, tokens)] = 0.0
        return _normalised(mass)


def _normalised(mass: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    total = float(mass.sum())
    return mass / np.float32(total) if total > 0 else mass


MAP_LAYERS = 4
"""Layers that are sampled, in the middles of as many equal parts of the model."""
MAP_ROW_STRIDE = 8
"""On a CPU, one of so many rows stands for them: a block of 32 has four. What a block received then
has rank correlation 0.984 with the map of all rows (one in four: 0.993, in 16: 0.973; medians over
blocks of a context of 2,500 tokens, SmolLM2-135M); another choice of layers makes as much of a
difference."""


def map_layers(layers: Sequence[int]) -> frozenset[int]:
    """Up to `MAP_LAYERS` of the layers."""
    picks = range(1, 2 * MAP_LAYERS, 2) if layers else ()
    return frozenset(layers[pick * len(layers) // (2 * MAP_LAYERS)] for pick in picks)


class MapCapture:
    """Pools the softmax rows of all rows that run, over blocks, heads and sampled layers.

    Costs one `[heads, rows / stride, tokens]` product per sampled layer; kept is the sum,
    `[blocks, blocks]`.

    Args:
        layers: indices of the layers to sample; without any, nothing is measured and rows that run
            are unknown.
        prior: map of the version that rows are restored from, at their new positions; None where
            none are, or nothing is known of them.
    """

    def __init__(self, *, layers: frozenset[int], prior: BlockMap | None) -> None:
        self._layers = layers
        self._counting_layer = max(
            layers, default=-1
        )  # each row passes every layer; it counts once
        self._prior = prior
        self._mass: dict[torch.device, torch.Tensor] = {}  # by the device of the layers
        self._ran: list[tuple[int, int]] = []

    def observe(
        self, layer: int, start: int, query: torch.Tensor, key: torch.Tensor, scaling: float | None
    ) -> None:
        """Add the attention of rows; arguments as for `AttentionCapture.observe`."""
        if layer not in self._layers:
            return
        tokens = key.shape[1]
        if layer == self._counting_layer:
            self._ran.append((start, tokens))
        mass = self._mass.get(key.device)
        if mass is None:
            mass = torch.zeros(0, 0, dtype=torch.float32, device=key.device)
        missing = -(-tokens // MAP_BLOCK) - len(mass)
        if missing > 0:
            mass = F.pad(mass, (0, missing, 0, missing))
        self._mass[key.device] = mass
        stride = 1 if key.is_cuda else MAP_ROW_STRIDE
        add_block_mass(mass, query, key, block_size=MAP_BLOCK, scaling=scaling, row_stride=stride)

    def block_map(self, tokens: int) -> BlockMap:
        """The map of the first `tokens` tokens: what ran anew, what was carried over elsewhere."""
        blocks = -(-tokens // MAP_BLOCK)
        fresh = np.zeros((blocks, blocks), dtype=np.float32)
        for own in self._mass.values():
            seen = min(blocks, len(own))
            fresh[:seen, :seen] += own[:seen, :seen].cpu().numpy()
        borders = np.minimum(np.arange(blocks + 1) * MAP_BLOCK, tokens)
        ran = np.zeros(tokens + 1, dtype=np.int64)
        for start, stop in self._ran:
            ran[min(start, tokens) + 1 : min(stop, tokens) + 1] = 1
        share = np.diff(np.cumsum(ran)[borders]) / np.diff(borders)
        prior = BlockMap.unknown(0) if self._prior is None else self._prior
        return prior.grown(tokens).refreshed(fresh, share.astype(np.float32))
