"""What recomputing some more blocks brings, by the rule that chooses them, at equal budget.

The base of all rules: new tokens, a window behind each edit and the query tail are computed, and
all other rows are those of an exact prefill of the old context, moved; nothing is quantised. A rule
adds the same number of restored blocks. The measure is a full prefill of the new context: its
greedy answer, at most 16 tokens, is forced upon each state.

The rules: `attention` (largest score of a token, as the default policy ranks), `near_edit` (nearest
behind an edit), `random` (the mean of some draws), `low_attention` (smallest), `edited` (attention
given to the edited blocks, directly and through others), `combined` (that times the attention
received), `question` (attention of the last prompt rows), and, for what is possible,
`true_drift`: largest drift of values, which only a full prefill tells.

A point is a rule on a context: `context`, `row`, `edit`, `rule`, `draw` (of `random`; 0 else),
`tokens`, `budget` (blocks wanted), `blocks` (added), `rows` (added), `repair_ratio` (of the
suffix), `kl` (nats, mean over the answer's tokens), `first_kl` (of the first),
`exact_continuation` (whether the greedy answer is the same). `base` and `none` (only new tokens
and the last one are computed) are rules too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from patchkv_agents.alignment import Alignment, align
from patchkv_agents.backends.transformers.adapter import RowCache
from patchkv_agents.backends.transformers.capture import (
    PROMPT_QUERIES,
    AttentionCapture,
    sampled_layers,
)
from patchkv_agents.backends.transformers.map_capture import MapCapture, map_layers
from patchkv_agents.engine import Engine
from patchkv_agents.errors import InputError
from patchkv_agents.profiling.checking import check_model
from patchkv_agents.profiling.drift import block_drift
from patchkv_agents.profiling.forced import ExactPrompt, captured_prefill, exact_prompt
from patchkv_agents.ranges import BoolArray, IntArray, RowSet
from patchkv_agents.recovery import RecoveryPolicy
from patchkv_agents.recovery.edit_mass import edit_mass
from patchkv_agents.recovery.plan import RecoveryPlan, plan_recovery
from patchkv_evals.benchmarks.contexts import EditedContext, check_data, edited_contexts
from patchkv_evals.benchmarks.results import BenchResult, Column, number
from patchkv_evals.benchmarks.selection_summary import points_text, ratio_text
from patchkv_evals.benchmarks.timing import Point, Report, Steps, silent
from patchkv_kernels.rotary import rotate_keys
from patchkv_kernels.row_moves import rotation_table

RULES = (
    "attention",
    "near_edit",
    "random",
    "low_attention",
    "edited",
    "combined",
    "question",
    "true_drift",
)
_BLOCK = 32
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SelectionConfig:
    """On what rules are compared.

    Attributes:
        tokens: length of the contexts.
        data: file of rows; without one, the demo's episode.
        dataset: of the rows.
        edits: kinds of the episodes made of each row.
        limit: episodes of each kind.
        budget: blocks that a rule adds, as a share of the suffix.
        window: tokens of the base's window.
        tail: tokens of the base's tail.
        draws: of the random rule.
        model: name of the engine's model, for the record.

    Raises:
        InputError: a file is named and its data set is not, or a number is out of range.
    """

    tokens: int = 1500
    data: str | None = None
    dataset: str | None = None
    edits: tuple[Any, ...] = ("refresh",)
    limit: int = 4
    budget: float = 0.05
    window: int = 32
    tail: int = 64
    draws: int = 3
    model: str = "smollm2"

    def __post_init__(self) -> None:
        check_data(self.data, self.dataset, self.edits)
        if not 0.0 < self.budget <= 1.0:
            raise InputError(f"the budget is {self.budget}: use more than 0, up to 1")
        if self.draws < 1:
            raise InputError(f"draws is {self.draws}: use 1 or more")


def selection(engine: Engine, config: SelectionConfig, report: Report = silent) -> BenchResult:
    """Try every rule on every context.

    Raises:
        InputError: a context does not fit the model, or cannot be made.
        UnsupportedModelError: keys of this model cannot be moved.
    """
    check_model(engine)
    edits = config.edits if config.data else ("refresh",)
    contexts = [
        (edit, context)
        for edit in edits
        for context in edited_contexts(
            engine.tokenizer,
            tokens=config.tokens,
            data=config.data,
            dataset=config.dataset,
            edit=edit,
            limit=config.limit,
        )
    ]
    steps = Steps(len(contexts), report)
    points: list[Point] = []
    for edit, context in contexts:
        steps.next(f"{context.name}, {len(context.new):,} tokens")
        about = {"context": context.name, "row": context.row, "edit": edit}
        points += [about | point for point in rules_on(engine, context, config)]
    return BenchResult(
        "selection",
        asdict(config) | {"edits": list(edits)},
        points,
        str(engine.adapter.device),
        variant=config.dataset or "",
    )


def rules_on(engine: Engine, context: EditedContext, config: SelectionConfig) -> Iterator[Point]:
    """The points of one context, without what they have in common."""
    bench = _Bench(engine, context, config)
    yield bench.point("none", bench.computed("none"), 0)
    yield bench.point("base", bench.computed("base"), 0)
    ranks = bench.ranks()
    for rule in RULES:
        for draw in range(config.draws if rule == "random" else 1):
            order = bench.order(ranks[rule](draw))
            yield bench.point(rule, bench.computed("base") | bench.rows_of(order), draw)


class _Bench:
    """One context: its exact states, and the old rows moved to where the new context has them."""

    def __init__(self, engine: Engine, context: EditedContext, config: SelectionConfig) -> None:
        self._engine, self._config = engine, config
        self._alignment: Alignment = align(context.old, context.new)
        layers = map_layers(engine.adapter.scored_layers)
        block_map = MapCapture(layers=layers, prior=None) if layers else None
        old, capture, _ = captured_prefill(engine, context.old, block_map=block_map)
        self._old, self._scores = old, capture.scores(len(context.old))
        self._map = capture.block_map(len(context.old))
        self._exact: ExactPrompt = exact_prompt(engine, context.new)
        self._plans = {
            "none": self._plan(RecoveryPolicy("none", 0, 0.0, 1)),
            "base": self._plan(RecoveryPolicy("base", config.window, 0.0, config.tail)),
        }
        base = self._plans["base"]
        self._suffix = int(base.suffix.sum())
        self._budget = math.ceil(config.budget * self._suffix / _BLOCK)
        self._candidates: BoolArray = base.suffix & base.kept
        self._restored = self._moved()

    def _plan(self, policy: RecoveryPolicy) -> RecoveryPlan:
        tokens = self._alignment.tokens_old
        return plan_recovery(
            self._alignment,
            policy,
            origins=np.zeros(tokens, dtype=np.int16),
            available=np.ones(tokens, dtype=bool),
            scores=self._scores,
        )

    def computed(self, plan: str) -> BoolArray:
        """The rows that a plan computes, bool `[tokens]`."""
        return ~self._plans[plan].kept

    def ranks(self) -> dict[str, Callable[[int], Floats]]:
        """For each rule the worth of each block of the new context, by draw."""
        plan = self._plans["base"]
        old = np.where(plan.aligned >= 0, plan.aligned, 0)
        received = self._largest(np.where(plan.aligned >= 0, self._scores[old], 0.0))
        edited = np.zeros(len(old))
        if self._map is not None:
            edited = edit_mass(self._map, self._alignment)[old // self._map.block_size]
        stops = np.array([hunk.new_stop for hunk in self._alignment.hunks])
        position = np.arange(len(old))
        behind = np.maximum(np.searchsorted(stops, position, side="right") - 1, 0)
        near = self._largest(len(old) - (position - stops[behind]).astype(np.float64))
        question = self._largest(self._question_scores())
        drifts = self._drifts(len(received))
        return {
            "attention": lambda _: received,
            "near_edit": lambda _: near,
            "random": lambda draw: np.random.default_rng(draw).random(len(received)),
            "low_attention": lambda _: -received,
            "edited": lambda _: self._largest(edited),
            "combined": lambda _: self._largest(edited * self._scores[old]),
            "question": lambda _: question,
            "true_drift": lambda _: drifts,
        }

    def order(self, worth: Floats) -> IntArray:
        """The blocks that a rule adds, best first."""
        has_candidates = np.logical_or.reduceat(self._candidates, self._starts())
        ranked = np.argsort(-worth, kind="stable")
        return ranked[has_candidates[ranked]][: self._budget]

    def rows_of(self, blocks: IntArray) -> BoolArray:
        """The candidates in some blocks, bool `[tokens]`."""
        chosen = np.zeros(len(self._starts()), dtype=bool)
        chosen[blocks] = True
        rows: BoolArray = np.repeat(chosen, _BLOCK)[: len(self._candidates)] & self._candidates
        return rows

    def point(self, rule: str, computed: BoolArray, draw: int) -> Point:
        """What computing some rows gives."""
        cache = self._copy()
        found = self._exact.divergence(self._engine, cache, RowSet.of_mask(computed))
        suffix = self._plans["base"].suffix
        added = computed & self._candidates
        return {
            "rule": rule,
            "draw": draw,
            "tokens": self._alignment.tokens_new,
            "budget": self._budget,
            "blocks": int(np.logical_or.reduceat(added, self._starts()).sum()),
            "rows": int(added.sum()),
            "repair_ratio": float((computed & suffix).sum() / max(1, self._suffix)),
            "kl": found.kl,
            "first_kl": found.first_kl,
            "exact_continuation": found.same_answer,
        }

    def _starts(self) -> IntArray:
        return np.arange(0, self._alignment.tokens_new, _BLOCK)

    def _largest(self, worth: npt.NDArray[Any]) -> Floats:
        """Of the candidates in each block; smaller than any where there is none."""
        shown = np.where(self._candidates, worth.astype(np.float64), -np.inf)
        largest: Floats = np.maximum.reduceat(shown, self._starts())
        return largest

    def _moved(self) -> RowCache:
        """Old rows at their new positions; garbage where the new context has others."""
        adapter, plan = self._engine.adapter, self._plans["none"]
        kept = np.flatnonzero(plan.aligned >= 0)
        source = plan.aligned[kept]
        cache = adapter.new_cache(len(self._exact.token_ids))
        for layers, rope in self._engine.rope.runs(range(adapter.layers)):
            for layer in layers:
                (old_keys, old_values), (keys, values) = self._old.layer(layer), cache.layer(layer)
                cos, sin = rotation_table(rope, source, kept, keys.device)
                picked = old_keys[:, source].contiguous()
                moved = picked.new_empty(picked.shape)
                rotate_keys(picked, cos, sin, layout=rope.layout, out=moved)
                keys[:, kept], values[:, kept] = moved, old_values[:, source]
        cache.filled = self._alignment.tokens_new
        return cache

    def _copy(self) -> RowCache:
        cache = self._engine.adapter.new_cache(self._restored.capacity)
        for own, shard in zip(cache.shards, self._restored.shards, strict=True):
            own.keys.copy_(shard.keys)
            own.values.copy_(shard.values)
        cache.filled = self._restored.filled
        return cache

    def _question_scores(self) -> npt.NDArray[np.float32]:
        """Attention that the last prompt rows give in the new context, once the base has run."""
        adapter, tokens = self._engine.adapter, self._alignment.tokens_new
        capture = AttentionCapture(layers=sampled_layers(adapter.scored_layers), prior=None)
        capture.announce(max(0, tokens - PROMPT_QUERIES), tokens)
        rows = RowSet.of_mask(self.computed("base"))
        adapter.forward_rows(self._exact.token_ids[:tokens], rows, self._copy(), capture=capture)
        return capture.scores(tokens)

    def _drifts(self, blocks: int) -> Floats:
        """The drift of values of each block, 0 in front of the edits."""
        found = np.zeros(blocks)
        drifts = block_drift(
            self._engine, self._alignment, self._old, self._exact.cache, block=_BLOCK, keys=False
        )
        for each in drifts:
            index = each.start // _BLOCK
            found[index] = max(found[index], each.figures["value_drift"])
        return found


COLUMNS = (
    Column("rule", number("rule", "")),
    Column("n", number("n")),
    Column("repaired", number("repair_ratio", ".1%")),
    Column("KL median", number("kl_median", ".1e")),
    Column("base's KL / KL [95%]", lambda point: ratio_text(point["kl_gain"])),
    Column("same answer", number("exact", ".0%")),
    Column("gain, points [95%]", lambda point: points_text(point["exact_gain"])),
)
