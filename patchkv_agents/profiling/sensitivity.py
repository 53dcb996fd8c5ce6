"""How much each block's precision matters, by intervention.

One block of a prompt is replaced by what low-precision storage leaves of it, all others stay exact,
and the exact answer is forced upon that state. Computed anew are the last token of the prompt and
those of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from patchkv_agents.checkpoint.precision import block_risks, low_bit_errors
from patchkv_agents.engine import Engine
from patchkv_agents.errors import InputError
from patchkv_agents.profiling.forced import exact_prompt
from patchkv_agents.profiling.low_precision import block_lengths, exact_rows, stored_rows
from patchkv_agents.ranges import BoolArray, IntArray, RowSet
from patchkv_kernels import PayloadFormat

TOP = 0.1
"""Share of the blocks whose part of the total divergence is reported."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Sensitivity:
    """One prompt.

    Attributes:
        lengths: rows of each block, int64 `[blocks]`.
        kl: divergence from lowering a block, mean over the answer's tokens, nats `[blocks]`.
        first_kl: of the answer's first token, nats `[blocks]`.
        scored: whether the attention that all rows of a block received is known: not behind the
            first query whose attention is collected. Storage never lowers other blocks to 4 bits.
            Bool `[blocks]`.
        attention: received by a block's rows, mean, in units of the mean over all rows `[blocks]`.
        error: relative error that 4-bit values leave in its rows, mean `[blocks]`.
        risk: mean of both's product, as precision is chosen by `[blocks]`.
        joint_kl: from lowering all blocks at once.
        answer_tokens: over which divergences are means.
    """

    lengths: IntArray
    kl: Floats
    first_kl: Floats
    scored: BoolArray
    attention: Floats
    error: Floats
    risk: Floats
    joint_kl: float
    answer_tokens: int


def block_sensitivity(
    engine: Engine,
    token_ids: IntArray,
    *,
    format: PayloadFormat = PayloadFormat.K8V4,
    block: int = 32,
) -> Sensitivity:
    """Lower every block of a prompt, one after the other.

    Args:
        engine: runs it.
        token_ids: of the prompt, int64 `[tokens]`. Its last token, which always runs, is stored by
            no block.
        format: in which a block is stored.
        block: tokens of a block.

    Raises:
        InputError: the prompt does not fit the model, or is shorter than two blocks.
        UnsupportedModelError: rows of this model are always stored losslessly.
        PatchKVError: logits are not numbers.
    """
    stored = len(token_ids) - 1
    if stored < 2 * block:
        raise InputError(f"{len(token_ids)} tokens are fewer than two blocks of {block}: use more")
    prompt = exact_prompt(engine, token_ids)
    cache, nothing_else = prompt.cache, RowSet(())
    lengths = block_lengths(stored, block)
    errors = low_bit_errors(
        [values for s in cache.shards for values in s.values], np.arange(stored)
    )
    exact = exact_rows(cache, stored)
    lowered = stored_rows(engine, cache, lengths, format)
    found = []
    stops = np.cumsum(lengths)
    for stop, length in zip(stops.tolist(), lengths, strict=True):
        rows = np.zeros(stored, dtype=bool)
        rows[stop - length : stop] = True
        lowered.write(cache, rows)
        found.append(prompt.divergence(engine, cache, nothing_else))
        exact.write(cache, rows)
    lowered.write(cache, np.ones(stored, dtype=bool))
    joint = prompt.divergence(engine, cache, nothing_else)

    scores, counts = prompt.scores[:stored], np.array(lengths)

    def of_blocks(rows: npt.NDArray[np.floating]) -> Floats:
        means: Floats = np.add.reduceat(rows.astype(np.float64), stops - counts) / counts
        return means

    return Sensitivity(
        lengths=counts,
        kl=np.array([each.kl for each in found]),
        first_kl=np.array([each.first_kl for each in found]),
        scored=np.minimum.reduceat(scores, stops - counts) > 0,
        attention=len(token_ids) * of_blocks(scores),
        error=of_blocks(errors),
        risk=block_risks(0.0, scores, errors, counts, tokens=len(token_ids)),
        joint_kl=joint.kl,
        answer_tokens=len(prompt.answer),
    )


def share_of_top(kl: Sequence[float] | Floats, by: Sequence[float] | Floats) -> float:
    """Share of the total divergence in the tenth of the blocks that come first.

    Args:
        kl: of each block. Without any, the share is 0.
        by: blocks with the largest of these come first; `kl` itself gives the most there can be.
    """
    order = np.argsort(-np.asarray(by), kind="stable")
    count = max(1, round(TOP * len(order)))
    divergences = np.asarray(kl)
    total = float(divergences.sum())
    return float(divergences[order[:count]].sum()) / total if total > 0 else 0.0


def rank_correlation(a: Sequence[float] | Floats, b: Sequence[float] | Floats) -> float:
    """Spearman's: of the ranks, equal figures sharing theirs; NaN where all are equal."""

    def ranks(figures: Sequence[float] | Floats) -> Floats:
        _, place, counts = np.unique(figures, return_inverse=True, return_counts=True)
        last = np.cumsum(counts)
        middle: Floats = (last - (counts - 1) / 2.0)[place]
        return middle

    first, second = ranks(a), ranks(b)
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])
