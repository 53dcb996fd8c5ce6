"""Drift of keys and values against the distance to the edit; see `patchkv_agents.profiling.drift`.

A point is a block: `context`, `edit` (kind), `distance` (tokens from the end of the nearest edit
in front of it), `tokens`, and its figures, by the names in `FIELDS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from patchkv_agents.alignment import align
from patchkv_agents.engine import Engine
from patchkv_agents.profiling.checking import check_model
from patchkv_agents.profiling.drift import KEYS, VALUES, block_drift, prefilled
from patchkv_evals.benchmarks.contexts import EditedContext, check_data, edited_contexts
from patchkv_evals.benchmarks.results import BenchResult, Column, number
from patchkv_evals.benchmarks.timing import Point, Report, Steps, silent

FIELDS = (*VALUES, *KEYS)
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
        check_data(self.data, self.dataset, (self.edit,))


def drift(engine: Engine, config: DriftConfig, report: Report = silent) -> BenchResult:
    """Measure every block behind the edits.

    Raises:
        InputError: a context does not fit the model, or cannot be made.
        UnsupportedModelError: keys of this model cannot be moved.
    """
    check_model(engine)
    contexts = edited_contexts(
        engine.tokenizer,
        tokens=config.tokens,
        data=config.data,
        dataset=config.dataset,
        edit=config.edit,
        limit=config.limit,
    )
    kind = "refresh" if config.data is None else config.edit
    steps = Steps(len(contexts), report)
    points: list[Point] = []
    for context in contexts:
        engine.check_length(max(len(context.old), len(context.new)))
        steps.next(f"{context.name}, {len(context.new):,} tokens")
        points += drift_of(engine, context, kind, config.block)
    return BenchResult(
        "drift",
        {**asdict(config), "edit": kind},
        points,
        str(engine.adapter.device),
        variant=config.dataset or "",
    )


def drift_of(engine: Engine, context: EditedContext, kind: str, block: int) -> list[Point]:
    """The points of one context; see the module's text."""
    old, new = (prefilled(engine, token_ids) for token_ids in (context.old, context.new))
    blocks = block_drift(engine, align(context.old, context.new), old, new, block=block, keys=True)
    return [
        {
            "context": context.name,
            "edit": kind,
            "distance": each.distance,
            "tokens": each.stop - each.start,
            **each.figures,
        }
        for each in blocks
    ]


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
