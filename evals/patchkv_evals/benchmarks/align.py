"""How long alignment and plan take, by length and number of edits. Needs no model.

Token ids are drawn (`text`): `zipf` has frequent and rare tokens as text has, `repeated` has a
third of its passages twice, as retrieved pages come again. Edits replace spans of up to 64 tokens,
evenly spread behind the first fifth.

A point: `text`, `tokens`, `hunks` (wanted), `hunks_found`, `align_ms`, `plan_ms` (of the default
policy), each with `*_rounds_ms`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from patchkv_agents.alignment import Alignment, align
from patchkv_agents.checkpoint.block_map import MAP_BLOCK, BlockMap
from patchkv_agents.console import plural
from patchkv_agents.ranges import IntArray
from patchkv_agents.recovery import RecoveryPolicy
from patchkv_agents.recovery.plan import RecoveryPlan, plan_recovery
from patchkv_evals.benchmarks.results import BenchResult, Column, number, spread
from patchkv_evals.benchmarks.synthetic import repeating_ids, text_like_ids, with_hunks
from patchkv_evals.benchmarks.timing import (
    Point,
    Report,
    Steps,
    interleaved,
    milliseconds,
    silent,
    timing,
)

MIN_TOKENS_BETWEEN = 60
"""More edits than one in so many tokens are left out: nothing between them would be found again."""
TEXTS = {"zipf": text_like_ids, "repeated": repeating_ids}


@dataclass(frozen=True, slots=True)
class AlignConfig:
    """Lengths, and numbers of edits."""

    tokens: tuple[int, ...] = (1000, 4000, 16_000, 64_000)
    hunks: tuple[int, ...] = (1, 8, 64)
    rounds: int = 9


def align_and_plan(config: AlignConfig, report: Report = silent) -> BenchResult:
    """Measure each text at each length with each number of edits."""
    cases = [
        (text, tokens, hunks)
        for text in TEXTS
        for tokens in config.tokens
        for hunks in config.hunks
        if tokens >= MIN_TOKENS_BETWEEN * hunks
    ]
    steps = Steps(sum(tokens for _, tokens, _ in cases), report)
    points = []
    for text, tokens, hunks in cases:
        steps.next(f"{text}, {tokens:,} tokens, {plural(hunks, 'edit')}", tokens)
        points.append(_measure(text, tokens, hunks, config.rounds))
    return BenchResult("align", asdict(config), points)


def planning(alignment: Alignment) -> Callable[[], RecoveryPlan]:
    """The default policy's plan, where every old row is exact and received some attention.

    A map of the old version's attention is there too, in case that the policy asks for one.
    """
    tokens = alignment.tokens_old
    rng = np.random.default_rng(0)
    scores = rng.random(tokens).astype(np.float32)
    blocks = -(-tokens // MAP_BLOCK)
    mass = np.tril(rng.random((blocks, blocks), dtype=np.float32))
    return partial(
        plan_recovery,
        alignment,
        RecoveryPolicy.default(),
        origins=np.zeros(tokens, dtype=np.int16),
        available=np.ones(tokens, dtype=bool),
        scores=scores / scores.sum(),
        block_map=BlockMap(MAP_BLOCK, mass / mass.sum(axis=1, keepdims=True)),
    )


def _measure(text: str, tokens: int, hunks: int, rounds: int) -> Point:
    old: IntArray = TEXTS[text](tokens)
    new = with_hunks(old, hunks)
    alignment = align(old, new)
    times = interleaved(
        {
            "align": partial(milliseconds, partial(align, old, new)),
            "plan": partial(milliseconds, planning(alignment)),
        },
        rounds,
    )
    return {
        "text": text,
        "tokens": len(new),
        "hunks": hunks,
        "hunks_found": len(alignment.hunks),
        **timing("align", times["align"]),
        **timing("plan", times["plan"]),
    }


COLUMNS = (
    Column("text", number("text", "")),
    Column("tokens", number("tokens")),
    Column("edits", number("hunks")),
    Column("hunks found", number("hunks_found")),
    Column("align ms", spread("align")),
    Column("plan ms", spread("plan")),
)
