"""How far old keys and values are from those of a full prefill, against the distance to the edit.

Old and new contexts are prefilled exactly; old rows behind the edit are compared with the new rows
of the same tokens, block by block on the new version's grid. Drift is the relative L2 distance of
a row's values, all heads together; figures of a block are medians over its tokens and up to 8
layers, evenly spaced. Keys are compared as they stand in the cache (`unmoved`) and after moving
them to their new positions.

A point is a block: `context`, `edit` (kind), `distance` (tokens from the end of the nearest edit
in front of it), `tokens`, `value_drift`, `value_cosine`, `key_drift`, `key_cosine`,
`key_drift_unmoved`, `key_cosine_unmoved`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from patchkv_agents.alignment import Alignment, align
from patchkv_agents.engine import Engine
from patchkv_agents.engine.adapter import RowCache
from patchkv_agents.engine.capture import sampled_layers
from patchkv_agents.engine.verdict import SupportLevel
from patchkv_agents.errors import InputError, UnsupportedModelError
from patchkv_agents.ranges import IntArray, RowSet
from patchkv_evals.benchmarks.contexts import EditedContext, demo_context, row_contexts
from patchkv_evals.benchmarks.results import BenchResult, Column, number
from patchkv_evals.benchmarks.timing import Point, Report, Steps, silent
from patchkv_evals.episodes import EpisodeSpec
from patchkv_kernels.rotary import rotate_keys
from patchkv_kernels.row_moves import rotation_table

FIELDS = (
    "value_drift",
    "value_cosine",
    "key_drift",
    "key_cosine",
    "key_drift_unmoved",
    "key_cosine_unmoved",
)
BORDERS = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096, 1 << 30)
"""Distances between which the table sums up."""


@dataclass(frozen=True, slots=True)
class DriftConfig:
    """Whose drift is measured.

    Attributes:
        tokens: length of the contexts.
        data: file of rows; without one, the demo's episode.
        dataset: of the rows.
        edit: kind of the episodes made of rows.
        limit: episodes.
        block: tokens of a block.
        model: name of the engine's model, for the record.

    Raises:
        InputError: a file is named and its data set is not.
    """

    tokens: int = 2000
    data: str | None = None
    dataset: str | None = None
    edit: Any = "refresh"
    limit: int = 4
    block: int = 32
    model: str = "smollm2"

    def __post_init__(self) -> None:
        if (self.data is None) != (self.dataset is None):
            raise InputError("--data and --dataset belong together: give both, or neither")


def drift(engine: Engine, config: DriftConfig, report: Report = silent) -> BenchResult:
    """Measure every block behind the edits.

    Raises:
        InputError: a context does not fit the model, or cannot be made.
        UnsupportedModelError: keys of this model cannot be moved.
    """
    verdict = engine.support.verdict
    if verdict.level is SupportLevel.EXACT:
        raise UnsupportedModelError(f"keys of this model cannot be moved: {verdict.reason}")
    contexts = _contexts(engine, config)
    kind = "refresh" if config.data is None else config.edit
    steps = Steps(len(contexts), report)
    points: list[Point] = []
    for context in contexts:
        engine.check_length(max(len(context.old), len(context.new)))
        steps.next(f"{context.name}, {len(context.new):,} tokens")
        points += drift_of(engine, context, kind, config.block)
    return BenchResult("drift", asdict(config), points, str(engine.adapter.device))


def _contexts(engine: Engine, config: DriftConfig) -> Sequence[EditedContext]:
    if config.data is None or config.dataset is None:
        return [demo_context(engine.tokenizer, config.tokens)]
    return row_contexts(
        engine.tokenizer,
        Path(config.data),
        config.dataset,
        spec=EpisodeSpec(config.edit, tokens=config.tokens),
        limit=config.limit,
    )


@torch.inference_mode()
def drift_of(engine: Engine, context: EditedContext, kind: str, block: int) -> list[Point]:
    """The points of one context; see the module's text."""
    alignment = align(context.old, context.new)
    old, new = (_prefilled(engine, token_ids) for token_ids in (context.old, context.new))
    source = alignment.position_map()
    blocks = list(_blocks(alignment, source, block))
    if not blocks:
        return []
    kept = np.concatenate([np.arange(start, stop) for start, stop, _ in blocks])
    figures = _row_figures(engine, old, new, source[kept], kept)
    points = []
    cursor = 0
    for start, stop, distance in blocks:
        own = slice(cursor, cursor + stop - start)
        cursor = own.stop
        point: Point = {
            "context": context.name,
            "edit": kind,
            "distance": distance,
            "tokens": stop - start,
        }
        points.append(point | {name: float(figures[name][:, own].median()) for name in FIELDS})
    return points


def _prefilled(engine: Engine, token_ids: IntArray) -> RowCache:
    cache = engine.adapter.new_cache(len(token_ids))
    engine.adapter.forward_rows(token_ids, RowSet.of_range(0, len(token_ids)), cache)
    return cache


def _blocks(alignment: Alignment, source: IntArray, size: int) -> Iterator[tuple[int, int, int]]:
    """Aligned tokens behind the first edit, cut by the grid: start, stop, distance to the edit."""
    ends = [hunk.new_stop for hunk in alignment.hunks]
    for run in alignment.runs:
        start, stop = run.new_start, run.new_stop
        if start < alignment.prefix:
            continue
        edge = max(end for end in ends if end <= start)
        while start < stop:
            border = min(stop, (start // size + 1) * size)
            yield start, border, start - edge
            start = border


def _row_figures(
    engine: Engine, old: RowCache, new: RowCache, source: IntArray, kept: IntArray
) -> dict[str, torch.Tensor]:
    """Figures `[layers, rows]` of rows `kept` of `new` against rows `source` of `old`."""
    adapter = engine.adapter
    layers = sorted(sampled_layers(range(adapter.layers)))
    found: dict[str, list[torch.Tensor]] = {name: [] for name in FIELDS}
    for layer in layers:
        (old_keys, old_values), (new_keys, new_values) = (
            tuple(rows[:, index].float().cpu() for rows in cache.layer(layer))
            for cache, index in ((old, source), (new, kept))
        )
        pairs = {
            "value_{}": (old_values, new_values),
            "key_{}_unmoved": (old_keys, new_keys),
            "key_{}": (_moved(engine, layer, old_keys, source, kept), new_keys),
        }
        for name, (before, after) in pairs.items():
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


def by_distance(points: Sequence[Point]) -> list[Point]:
    """The table's lines: medians of the blocks between two distances."""
    lines = []
    for low, high in zip(BORDERS, BORDERS[1:], strict=False):
        own = [point for point in points if low <= point["distance"] < high]
        if own:
            line: Point = {"from": low, "blocks": len(own)}
            lines.append(line | {name: median(p[name] for p in own) for name in FIELDS})
    return lines


COLUMNS = (
    Column("from token", number("from")),
    Column("blocks", number("blocks")),
    *(Column(name.replace("_", " "), number(name, ".4f")) for name in FIELDS),
)
