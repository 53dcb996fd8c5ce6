"""How far old keys and values are from those of a full prefill, block by block behind an edit.

Old and new contexts are prefilled exactly; old rows behind the edit are compared with the new rows
of the same tokens, on the new version's grid. Drift is the relative L2 distance of a row, all heads
together; a figure of a block is the median over its rows and the sampled layers (up to 8, evenly
spaced). Keys are compared as they stand in the cache (`unmoved`) and after moving them to their
new positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from patchkv_agents.alignment import Alignment, Hunk
from patchkv_agents.backends.transformers.adapter import RowCache
from patchkv_agents.backends.transformers.capture import sampled_layers
from patchkv_agents.engine import Engine
from patchkv_agents.errors import PatchKVError
from patchkv_agents.ranges import IntArray, RowSet
from patchkv_kernels.rotary import rotate_keys
from patchkv_kernels.row_moves import rotation_table

VALUES = ("value_drift", "value_cosine")
KEYS = ("key_drift", "key_cosine", "key_drift_unmoved", "key_cosine_unmoved")


@dataclass(frozen=True, slots=True)
class BlockDrift:
    """A block behind an edit.

    Attributes:
        start, stop: its tokens in the new context, half-open.
        hunk: index of the nearest edit in front of it, in the alignment's hunks.
        distance: tokens from the end of that edit to `start`.
        figures: `VALUES`, and `KEYS` where they were asked for.
    """

    start: int
    stop: int
    hunk: int
    distance: int
    figures: Mapping[str, float]


def drift_layers(engine: Engine) -> tuple[int, ...]:
    """The layers that drift is measured in."""
    return tuple(sorted(sampled_layers(range(engine.adapter.layers))))


def prefilled(engine: Engine, token_ids: IntArray) -> RowCache:
    """The exact rows of a context."""
    cache = engine.adapter.new_cache(len(token_ids))
    engine.adapter.forward_rows(token_ids, RowSet.of_range(0, len(token_ids)), cache)
    return cache


@torch.inference_mode()
def block_drift(
    engine: Engine,
    alignment: Alignment,
    old: RowCache,
    new: RowCache,
    *,
    block: int = 32,
    keys: bool = False,
) -> list[BlockDrift]:
    """The drift of every block behind the first edit. Rows of one layer are copied at a time.

    Args:
        engine: whose rows they are.
        alignment: of the two contexts.
        old, new: their exact rows.
        block: tokens of a block.
        keys: whether keys are compared too.

    Raises:
        PatchKVError: the rows are not numbers.
    """
    source = alignment.position_map()
    blocks = list(_blocks(alignment, block))
    if not blocks:
        return []
    kept = np.concatenate([np.arange(start, stop) for start, stop, _, _ in blocks])
    figures = _row_figures(engine, old, new, source[kept], kept, keys=keys)
    if not all(bool(rows.isfinite().all()) for rows in figures.values()):
        raise PatchKVError(
            "the model's keys or values are not numbers: check its weights and dtype (float16 "
            "overflows in some models; try bfloat16 or float32)"
        )
    found = []
    cursor = 0
    for start, stop, hunk, distance in blocks:
        own = slice(cursor, cursor + stop - start)
        cursor = own.stop
        medians = {name: float(rows[:, own].median()) for name, rows in figures.items()}
        found.append(BlockDrift(start, stop, hunk, distance, medians))
    return found


def _blocks(alignment: Alignment, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Aligned tokens behind the first edit, cut by the grid: start, stop, hunk, distance to it."""
    hunks: tuple[Hunk, ...] = alignment.hunks
    for run in alignment.runs:
        start, stop = run.new_start, run.new_stop
        if start < alignment.prefix:
            continue
        nearest = max(n for n, hunk in enumerate(hunks) if hunk.new_stop <= start)
        while start < stop:
            border = min(stop, (start // size + 1) * size)
            yield start, border, nearest, start - hunks[nearest].new_stop
            start = border


def _row_figures(
    engine: Engine,
    old: RowCache,
    new: RowCache,
    source: IntArray,
    kept: IntArray,
    *,
    keys: bool,
) -> dict[str, torch.Tensor]:
    """Figures `[layers, rows]` of rows `kept` of `new` against rows `source` of `old`."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in (*VALUES, *(KEYS if keys else ()))}
    for layer in drift_layers(engine):
        (old_keys, old_values), (new_keys, new_values) = (
            tuple(rows[:, index].float().cpu() for rows in cache.layer(layer))
            for cache, index in ((old, source), (new, kept))
        )
        compared = {"value_{}": (old_values, new_values)}
        if keys:
            compared["key_{}_unmoved"] = (old_keys, new_keys)
            compared["key_{}"] = (_moved(engine, layer, old_keys, source, kept), new_keys)
        for name, (before, after) in compared.items():
            before, after = (rows.transpose(0, 1).flatten(1) for rows in (before, after))
            distance = (before - after).norm(dim=1) / after.norm(dim=1)
            found[name.format("drift")].append(distance)
            found[name.format("cosine")].append(torch.cosine_similarity(before, after, dim=1))
    return {name: torch.stack(each) for name, each in found.items()}


def _moved(
    engine: Engine, layer: int, keys: torch.Tensor, source: IntArray, kept: IntArray
) -> torch.Tensor:
    """Keys `[kv_heads, rows, head_dim]` of a layer, rotated from old to new positions."""
    ((_, own),) = engine.rope.runs(range(layer, layer + 1))
    cos, sin = rotation_table(own, source, kept, keys.device)
    out = torch.empty_like(keys)
    rotate_keys(keys, cos, sin, layout=own.layout, out=out)
    return out
