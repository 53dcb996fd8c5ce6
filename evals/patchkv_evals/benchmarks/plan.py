"""What is planned before a resume, and when rows are stored: milliseconds by part and length.

Rows, scores and token ids are random and have a model's shape: no model is needed. Aggregation is
from the summed attention mass to the scores of tokens; repair-set construction is the plan, given
the alignment; precision planning is from values and scores to the formats of blocks, of which
tagging is the part that is left once the errors of 4-bit values are known.

A point is one length: `tokens`, and `aggregation_ms`, `align_ms`, `repair_set_ms`,
`precision_planning_ms`, `tagging_ms`, each with `*_rounds_ms`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch

from patchkv_agents.alignment import Alignment, align
from patchkv_agents.backends.transformers.capture import PROMPT_QUERIES, AttentionCapture
from patchkv_agents.checkpoint.block_map import MAP_BLOCK, BlockMap
from patchkv_agents.checkpoint.precision import (
    PrecisionPolicy,
    assign_formats,
    block_formats,
    low_bit_errors,
)
from patchkv_agents.recovery import RecoveryPolicy
from patchkv_agents.recovery.plan import RecoveryPlan
from patchkv_evals.benchmarks.results import BenchResult, Column, spread
from patchkv_evals.benchmarks.results import number as text_of
from patchkv_evals.benchmarks.synthetic import (
    RowShape,
    block_ranges,
    text_like_ids,
    with_hunks,
)
from patchkv_evals.benchmarks.timing import (
    Point,
    Report,
    Steps,
    interleaved,
    milliseconds,
    silent,
    timing,
)

PARTS = ("aggregation", "align", "repair_set", "precision_planning", "tagging")


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """Lengths, edits (spans of up to 64 tokens behind the first fifth), and the rows' size."""

    tokens: tuple[int, ...] = (1000, 4000, 10_000)
    edits: int = 1
    shape: RowShape = RowShape()
    rounds: int = 9


def plan(config: PlanConfig, report: Report = silent) -> BenchResult:
    """Measure each part at each length."""
    steps = Steps(sum(config.tokens), report)
    points: list[Point] = []
    for tokens in config.tokens:
        steps.next(f"{tokens:,} tokens", tokens)
        device = torch.device(config.shape.device)
        times = interleaved(
            {
                name: partial(milliseconds, part, device)
                for name, part in _parts(config, tokens).items()
            },
            config.rounds,
        )
        point: Point = {"tokens": tokens}
        for name in PARTS:
            point |= timing(name, times[name])
        points.append(point)
    return BenchResult("plan", asdict(config), points, config.shape.device)


def _parts(config: PlanConfig, tokens: int) -> dict[str, Callable[[], object]]:
    shape = config.shape
    old = text_like_ids(tokens)
    new = with_hunks(old, config.edits)
    alignment = align(old, new)
    values = shape.random_rows(tokens)
    ranges = block_ranges(tokens)
    capture = AttentionCapture(layers=frozenset({0}), prior=None)
    first = max(0, tokens - PROMPT_QUERIES)
    capture.announce(first, tokens)
    capture.observe(0, first, values[0, :, first:], values[0], None)
    scores = capture.scores(tokens)
    errors = low_bit_errors(list(values), np.arange(tokens))
    lengths = np.array([stop - start for start, stop, _ in ranges])
    policy = PrecisionPolicy()
    return {
        "aggregation": partial(capture.scores, tokens),
        "align": partial(align, old, new),
        "repair_set": _planning(alignment),
        "precision_planning": partial(
            block_formats, policy, list(values), ranges, scores, tokens=tokens
        ),
        "tagging": partial(assign_formats, policy, scores, errors, lengths, tokens=tokens),
    }


def _planning(alignment: Alignment) -> Callable[[], RecoveryPlan]:
    """The default policy's plan, with every old row exact, random scores and a random block map."""
    tokens = alignment.tokens_old
    rng = np.random.default_rng(0)
    scores = rng.random(tokens).astype(np.float32)
    blocks = -(-tokens // MAP_BLOCK)
    mass = np.tril(rng.random((blocks, blocks), dtype=np.float32))
    return partial(
        RecoveryPolicy.default().method.plan,
        alignment,
        origins=np.zeros(tokens, dtype=np.int16),
        available=np.ones(tokens, dtype=bool),
        scores=scores / scores.sum(),
        block_map=BlockMap(MAP_BLOCK, mass / mass.sum(axis=1, keepdims=True)),
    )


COLUMNS = (
    Column("tokens", text_of("tokens")),
    Column("aggregation ms", spread("aggregation")),
    Column("alignment ms", spread("align")),
    Column("repair set ms", spread("repair_set")),
    Column("precision planning ms", spread("precision_planning")),
    Column("of it tagging", spread("tagging")),
)
