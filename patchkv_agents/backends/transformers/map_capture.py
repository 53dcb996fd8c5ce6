"""The block-to-block attention of the rows that run, collected layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from patchkv_agents.checkpoint.block_map import MAP_BLOCK, BlockMap
from patchkv_kernels import add_block_mass

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
