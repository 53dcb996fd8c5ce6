"""Which old rows behind an edit are computed again: dirty windows, query tail, attention blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from patchkv_agents.alignment import Alignment
from patchkv_agents.checkpoint.block_map import BlockMap
from patchkv_agents.ranges import BoolArray, IntArray, rounded_to_blocks
from patchkv_agents.recovery.edit_mass import edit_mass
from patchkv_agents.recovery.policy import RecoveryPolicy, Selection

if TYPE_CHECKING:
    from patchkv_agents.recovery.plan import RecoveryPlan

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Repair:
    """The repair set R, as disjoint masks over the new version's tokens, bool `[tokens]`."""

    window: BoolArray
    tail: BoolArray
    attention: BoolArray


def choose_repair(
    alignment: Alignment,
    policy: RecoveryPolicy,
    *,
    suffix: BoolArray,
    old: IntArray,
    scores: FloatArray,
    block_map: BlockMap | None = None,
) -> Repair:
    """Choose the rows of the suffix that a policy with a window computes again.

    The query tail comes first. Of what `most_repaired` leaves, the attention blocks have their
    share and the windows take the rest, nearest blocks of all edits first; in whole blocks, so
    that a little may be left over. The tail counts, and is computed even if it alone passes the
    limit. Blocks without any attention are not chosen.

    Args:
        alignment: of the old version with the new one.
        policy: how much is recomputed.
        suffix: rows with old state behind the first edit, bool `[tokens]`.
        old: old position of each token, anything where it has none; int64 `[tokens]`.
        scores: attention received by each old token, float32 `[tokens_old]`.
        block_map: where the old version's blocks looked; where nothing is known of that, `EDITED`
            and `COMBINED` choose as `BLOCKS` does.
    """
    block, tokens = policy.block_size, len(suffix)
    tail = np.arange(tokens) >= tokens - policy.tail_tokens
    if policy.tail_tokens > 1:
        tail = rounded_to_blocks(tail, block)
    tail &= suffix
    room = max(0, _limit(policy, suffix) - int(tail.sum()))

    distances, lengths = _windows(alignment, policy, suffix)
    window = rounded_to_blocks((distances < lengths) & suffix, block) & suffix
    open_window = window & ~tail
    values = _importance(policy, alignment, old, scores, block_map)
    blocks = _attention_blocks(policy, suffix)
    if blocks and policy.selection is not Selection.QUESTION:  # which ranks them later
        blocks = min(blocks, len(_ranked(values, suffix & ~tail, block)))
    others = int((suffix & ~window & ~tail).sum())
    if int(open_window.sum()) + min(blocks * block, others) > room:
        # What is cut off the windows is then a candidate for its attention like any other row.
        nearest = _ranked(tokens - distances, open_window, block)
        kept = _within(nearest, open_window, block, max(0, room - blocks * block))
        window = (window & tail) | kept
    room -= int((window & ~tail).sum())

    candidates = suffix & ~window & ~tail
    if policy.selection is Selection.TOKENS:
        best = math.ceil(policy.attention_fraction * int(suffix.sum()))
        values, blocks = _largest(values, candidates, best), best
    attention = np.zeros(tokens, dtype=bool)
    if blocks:
        attention = _within(_ranked(values, candidates, block)[:blocks], candidates, block, room)

    if policy.selection is Selection.CONTIGUOUS:
        rows = int((window | tail | attention).sum())
        return _contiguous(distances, suffix, block, rows)
    return Repair(window, tail & ~window, attention)


def _contiguous(distances: IntArray, candidates: BoolArray, block_size: int, rows: int) -> Repair:
    """As many of the candidates, the last token and those nearest behind the edits."""
    nothing = np.zeros(len(candidates), dtype=bool)
    others, tail = candidates.copy(), nothing.copy()
    others[-1], tail[-1] = False, candidates[-1]
    window = _nearest_tokens(distances, others, block_size, rows - int(tail.sum()))
    return Repair(window, tail, nothing)


def question_blocks(plan: RecoveryPlan, policy: RecoveryPolicy, scores: FloatArray) -> BoolArray:
    """The restored suffix rows in the blocks to which a question pays most attention.

    As many blocks as `Selection.BLOCKS` takes, within `most_repaired`; bool `[tokens]`.

    Args:
        plan: without attention blocks so far, as `plan_recovery` makes it for
            `Selection.QUESTION`.
        policy: how much is recomputed.
        scores: attention that the rows of the question gave to each token of the new version,
            float32 `[tokens]`.
    """
    candidates = plan.suffix & plan.kept
    blocks = _attention_blocks(policy, plan.suffix)
    order = _ranked(scores, candidates, policy.block_size)[:blocks]
    return _within(order, candidates, policy.block_size, repair_room(plan, policy))


def repair_room(plan: RecoveryPlan, policy: RecoveryPolicy) -> int:
    """Rows of the suffix that the policy lets be computed beside those that the plan computes."""
    return max(0, _limit(policy, plan.suffix) - int((plan.suffix & ~plan.kept).sum()))


def _limit(policy: RecoveryPolicy, suffix: BoolArray) -> int:
    share = 1.0 if policy.most_repaired is None else policy.most_repaired
    return int(share * int(suffix.sum()))


def _attention_blocks(policy: RecoveryPolicy, suffix: BoolArray) -> int:
    return math.ceil(policy.attention_fraction * int(suffix.sum()) / policy.block_size)


def _windows(
    alignment: Alignment, policy: RecoveryPolicy, suffix: BoolArray
) -> tuple[IntArray, IntArray]:
    """How far each token is from the nearest edit in front of it, and how far its window reaches.

    Both int64 `[tokens]`: tokens from the end of the edit, and the length of that edit's window. In
    front of all edits these are the number of tokens, and 0.
    """
    tokens = len(suffix)
    hunks = np.array(
        [(h.old_stop - h.old_start, h.new_stop - h.new_start, h.new_stop) for h in alignment.hunks],
        dtype=np.int64,
    ).reshape(-1, 3)
    removed, brought, stops = hunks.T
    lengths = np.full(len(hunks), policy.window_tokens, dtype=np.int64)
    if policy.window_model is not None:
        aligned = np.append(np.cumsum(suffix[::-1])[::-1], 0)  # to the end, from each position
        lengths = np.maximum(lengths, policy.window_model.lengths(removed, brought, aligned[stops]))
    position = np.arange(tokens)
    nearest = np.searchsorted(stops, position, side="right")  # 0: none in front of it
    distances = position - np.append(0, stops)[nearest]
    distances[nearest == 0] = tokens
    return distances, np.append(0, lengths)[nearest]


def _importance(
    policy: RecoveryPolicy,
    alignment: Alignment,
    old: IntArray,
    scores: FloatArray,
    block_map: BlockMap | None,
) -> FloatArray:
    """By what the tokens of the new version are ranked, float32 `[tokens]`."""
    if policy.selection is Selection.QUESTION:
        return np.zeros(len(old), dtype=np.float32)  # known only once the question has run
    if block_map is None or not policy.selection.needs_map or not block_map.mass.any():
        return scores[old]
    mass = edit_mass(block_map, alignment)[old // block_map.block_size]
    return mass if policy.selection is Selection.EDITED else mass * scores[old]


def _ranked(values: npt.NDArray[Any], candidates: BoolArray, block_size: int) -> IntArray:
    """Indices of the blocks with a positive value of a candidate, largest first."""
    starts = np.arange(0, len(values), block_size)
    best = np.maximum.reduceat(np.where(candidates, values, 0), starts)
    order = np.argsort(-best, kind="stable")
    return order[best[order] > 0]


def _within(order: IntArray, candidates: BoolArray, block_size: int, room: int) -> BoolArray:
    """The candidates in the first blocks of `order`, as many blocks as have room."""
    starts = np.arange(0, len(candidates), block_size)
    rows = np.add.reduceat(candidates.astype(np.int64), starts)
    chosen = np.zeros(len(starts), dtype=bool)
    chosen[order[np.cumsum(rows[order]) <= room]] = True
    return np.repeat(chosen, block_size)[: len(candidates)] & candidates


def _largest(values: FloatArray, candidates: BoolArray, limit: int) -> FloatArray:
    """The values of the `limit` candidates that have the largest, and 0 elsewhere."""
    kept = np.where(candidates, values, np.float32(0.0))
    kept[np.argsort(-kept, kind="stable")[limit:]] = 0
    return kept


def _nearest_tokens(
    distances: IntArray, suffix: BoolArray, block_size: int, limit: int
) -> BoolArray:
    """The `limit` suffix tokens nearest behind the edits, in whole blocks but for the last."""
    block = np.arange(len(suffix)) // block_size
    nearest = np.full(block[-1] + 1, len(suffix))
    np.minimum.at(nearest, block[suffix], distances[suffix])
    tokens = np.flatnonzero(suffix)
    order = tokens[np.argsort(nearest[block[tokens]], kind="stable")]
    chosen = np.zeros(len(suffix), dtype=bool)
    chosen[order[:limit]] = True
    return chosen
