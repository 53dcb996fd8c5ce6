"""Ranking blocks of rows, and taking as many of them as have room. NumPy only."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from patchkv_agents.ranges import BoolArray, IntArray

FloatArray = npt.NDArray[np.float32]


def ranked(values: npt.NDArray[Any], candidates: BoolArray, block_size: int) -> IntArray:
    """Indices of the blocks with a positive value of a candidate, largest first."""
    starts = np.arange(0, len(values), block_size)
    best = np.maximum.reduceat(np.where(candidates, values, 0), starts)
    order = np.argsort(-best, kind="stable")
    return order[best[order] > 0]


def within(order: IntArray, candidates: BoolArray, block_size: int, room: int) -> BoolArray:
    """The candidates in the first blocks of `order`, as many blocks as have room."""
    starts = np.arange(0, len(candidates), block_size)
    rows = np.add.reduceat(candidates.astype(np.int64), starts)
    chosen = np.zeros(len(starts), dtype=bool)
    chosen[order[np.cumsum(rows[order]) <= room]] = True
    return np.repeat(chosen, block_size)[: len(candidates)] & candidates


def largest(values: FloatArray, candidates: BoolArray, limit: int) -> FloatArray:
    """The values of the `limit` candidates that have the largest, and 0 elsewhere."""
    top = np.where(candidates, values, np.float32(0.0))
    top[np.argsort(-top, kind="stable")[limit:]] = 0
    return top


def nearest_tokens(
    distances: IntArray, candidates: BoolArray, block_size: int, limit: int
) -> BoolArray:
    """The `limit` candidates nearest behind the edits, in whole blocks but for the last."""
    block = np.arange(len(candidates)) // block_size
    nearest = np.full(block[-1] + 1, len(candidates))
    np.minimum.at(nearest, block[candidates], distances[candidates])
    tokens = np.flatnonzero(candidates)
    order = tokens[np.argsort(nearest[block[tokens]], kind="stable")]
    chosen = np.zeros(len(candidates), dtype=bool)
    chosen[order[:limit]] = True
    return chosen
