"""How much each block's precision matters, by intervention; see `profiling.sensitivity`.

One block of a context is replaced by what storage in a low-precision format leaves of it, all
others stay exact. Contexts are those before the edit of a data set's episodes, or of the demo's.

A point of kind `block`: `context`, `place` (its middle, as a share of the context), `tokens`, `kl`
(nats, mean over the tokens of the exact greedy answer, at most 16), `first_kl` (of the first),
`scored` (whether the attention that its rows received is known; storage never lowers others to 4
bits), `attention` (mean of its rows in units of the mean of all), `error` (of 4-bit values), `risk`
(mean of both's product).

A point of kind `context`: `context`, `tokens`, `blocks`, `answer_tokens`, `total_kl` (of its
blocks), `joint_kl` (all blocks lowered at once), the shares of the total in the tenth of the blocks
with the largest `kl` (`top_kl`), `risk` (`top_risk`), `attention` and `error`, unscored blocks
first, and the rank correlations of scored blocks' `kl` with the last three (`rank_risk`, ...; null
where all are equal).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from patchkv_agents.engine import Engine
from patchkv_agents.errors import InputError
from patchkv_agents.estimates import quantiles
from patchkv_agents.profiling.sensitivity import (
    Sensitivity,
    block_sensitivity,
    rank_correlation,
    share_of_top,
)
from patchkv_evals.benchmarks.contexts import check_data, edited_contexts
from patchkv_evals.benchmarks.results import BenchResult, Column, number
from patchkv_evals.benchmarks.timing import Point, Report, Steps, silent
from patchkv_kernels import PayloadFormat

PREDICTORS = ("risk", "attention", "error")
"""What is known of a block without lowering it."""


@dataclass(frozen=True, slots=True)
class SensitivityConfig:
    """Whose blocks are lowered, and how.

    Attributes:
        tokens: length of the contexts.
        data: file of rows; without one, the demo's episode.
        dataset: of the rows.
        edit: kind of the episodes made of rows.
        limit: episodes.
        block: tokens of a block.
        format: in which a block is stored: k8v8, k8v4 or k4v4.
        model: name of the engine's model, for the record.

    Raises:
        InputError: a file is named and its data set is not, or there is no such format.
    """

    tokens: int = 1500
    data: str | None = None
    dataset: str | None = None
    edit: Any = "refresh"
    limit: int = 4
    block: int = 32
    format: str = "k8v4"
    model: str = "smollm2"

    def __post_init__(self) -> None:
        check_data(self.data, self.dataset, (self.edit,))
        known = [format.value for format in PayloadFormat if format.is_quantised]
        if self.format not in known:
            raise InputError(f"no format '{self.format}': use one of {', '.join(known)}")


def sensitivity(engine: Engine, config: SensitivityConfig, report: Report = silent) -> BenchResult:
    """Lower every block of every context.

    Raises:
        InputError: a context does not fit the model, or cannot be made.
        UnsupportedModelError: rows of this model are always stored losslessly.
    """
    contexts = edited_contexts(
        engine.tokenizer,
        tokens=config.tokens,
        data=config.data,
        dataset=config.dataset,
        edit=config.edit,
        limit=config.limit,
    )
    steps = Steps(sum(len(context.old) for context in contexts), report)
    points: list[Point] = []
    for context in contexts:
        steps.next(f"{context.name}, {len(context.old):,} tokens", len(context.old))
        found = block_sensitivity(
            engine, context.old, format=PayloadFormat(config.format), block=config.block
        )
        points += _points(context.name, len(context.old), found)
    variant = config.dataset or ""
    return BenchResult(
        "sensitivity", asdict(config), points, str(engine.adapter.device), variant=variant
    )


def _points(name: str, tokens: int, found: Sensitivity) -> list[Point]:
    """The points of one context, that of the whole context first."""
    stops = np.cumsum(found.lengths)
    figures = {key: getattr(found, key) for key in ("kl", "first_kl", *PREDICTORS)}
    blocks: list[Point] = [
        {
            "kind": "block",
            "context": name,
            "place": float((stops[index] - length / 2) / tokens),
            "tokens": int(length),
            "scored": bool(found.scored[index]),
            **{key: float(values[index]) for key, values in figures.items()},
        }
        for index, length in enumerate(found.lengths)
    ]
    known = {key: figures[key][found.scored] for key in PREDICTORS}
    first = {key: np.where(found.scored, figures[key], np.inf) for key in PREDICTORS}
    context: Point = {
        "kind": "context",
        "context": name,
        "tokens": tokens,
        "blocks": len(blocks),
        "answer_tokens": found.answer_tokens,
        "total_kl": float(found.kl.sum()),
        "joint_kl": found.joint_kl,
        "top_kl": share_of_top(found.kl, found.kl),
        **{f"top_{key}": share_of_top(found.kl, values) for key, values in first.items()},
        **{
            f"rank_{key}": _finite(rank_correlation(found.kl[found.scored], values))
            for key, values in known.items()
        },
    }
    return [context, *blocks]


def _finite(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None


def contexts_of(points: Sequence[Point]) -> list[Point]:
    """The table's lines: each context."""
    return [point for point in points if point["kind"] == "context"]


def notes(result: BenchResult) -> list[str]:
    """What the contexts have in common, in a sentence."""
    shares = [point["top_kl"] for point in contexts_of(result.points)]
    low, middle, high = quantiles(shares, [0.0, 0.5, 1.0])
    return [
        f"The most sensitive tenth of the blocks has {middle:.0%} of the divergence (median of "
        f"{len(shares)}; {low:.0%} to {high:.0%}). By risk, attention, error: the share of the "
        "tenth that comes first by these, blocks of unknown attention before all; 10% is chance."
    ]


COLUMNS = (
    Column("context", number("context", "")),
    Column("tokens", number("tokens")),
    Column("blocks", number("blocks")),
    Column("KL, sum of blocks", number("total_kl", ".1e")),
    Column("KL, all at once", number("joint_kl", ".1e")),
    Column("in top tenth", number("top_kl", ".0%")),
    *(Column(f"by {key}", number(f"top_{key}", ".0%")) for key in PREDICTORS),
    *(Column(f"rank {key}", number(f"rank_{key}", ".2f")) for key in PREDICTORS),
)
