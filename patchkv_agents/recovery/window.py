"""How far behind an edit old state is wrong: a length predicted from the sizes of the edit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from patchkv_agents.alignment import Alignment
from patchkv_agents.errors import InputError
from patchkv_agents.ranges import BoolArray, IntArray

FEATURES = ("old", "new", "suffix", "old*new", "old*suffix", "new*suffix")
"""log1p of the tokens that an edit removed, of those that it brought, and of the suffix behind it;
and their products, two by two."""


def window_features(old: IntArray, new: IntArray, suffix: IntArray) -> npt.NDArray[np.float64]:
    """The features of edits, float64 `[edits, 6]`, in the order of `FEATURES`.

    Args:
        old, new, suffix: tokens that each edit removed, that it brought, and that are aligned
            behind it; int64 `[edits]`.
    """
    logs = [np.log1p(sizes.astype(np.float64)) for sizes in (old, new, suffix)]
    products = [logs[0] * logs[1], logs[0] * logs[2], logs[1] * logs[2]]
    return np.stack([*logs, *products], axis=1)


@dataclass(frozen=True, slots=True)
class WindowModel:
    """The length of the dirty window as a regression: `log1p(length)` is linear in the features.

    Attributes:
        intercept: of the regression.
        coefficients: one for each of `FEATURES`.

    Raises:
        InputError: not six finite coefficients and a finite intercept.
    """

    intercept: float
    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        numbers = (self.intercept, *self.coefficients)
        if len(self.coefficients) != len(FEATURES) or not all(map(math.isfinite, numbers)):
            raise InputError(
                f"a window model has {len(FEATURES)} finite coefficients and a finite intercept"
            )

    def lengths(self, old: IntArray, new: IntArray, suffix: IntArray) -> IntArray:
        """Tokens of the window behind each edit, int64 `[edits]`, from 0 to `suffix`.

        Args:
            old, new, suffix: as for `window_features`.
        """
        logs = window_features(old, new, suffix) @ np.array(self.coefficients) + self.intercept
        # Clipped before the exponential, which would overflow far from the data it was fitted to.
        lengths = np.expm1(np.clip(logs, 0.0, np.log1p(suffix.astype(np.float64))))
        # A length that rounding puts just above a whole number is that number.
        clipped: IntArray = np.minimum(np.ceil(lengths - 1e-6), suffix).astype(np.int64)
        return clipped

    def length(self, old: int, new: int, suffix: int) -> int:
        """Tokens of the window behind one edit; see `lengths`."""
        sizes = (np.array([size], dtype=np.int64) for size in (old, new, suffix))
        return int(self.lengths(*sizes)[0])


def window_distances(
    alignment: Alignment, suffix: BoolArray, *, least: int, model: WindowModel | None
) -> tuple[IntArray, IntArray]:
    """How far each token is from the nearest edit in front of it, and how far its window reaches.

    Args:
        alignment: of the old version with the new one.
        suffix: rows with old state behind the first edit, bool `[tokens]`.
        least: shortest window, in tokens.
        model: predicts the length of each window; None gives all of them the shortest.

    Returns:
        Tokens from the end of the edit, and the length of that edit's window, both int64
        `[tokens]`. In front of all edits these are the number of tokens, and 0.
    """
    tokens = len(suffix)
    hunks = np.array(
        [(h.old_stop - h.old_start, h.new_stop - h.new_start, h.new_stop) for h in alignment.hunks],
        dtype=np.int64,
    ).reshape(-1, 3)
    removed, brought, stops = hunks.T
    lengths = np.full(len(hunks), least, dtype=np.int64)
    if model is not None:
        aligned = np.append(np.cumsum(suffix[::-1])[::-1], 0)  # to the end, from each position
        lengths = np.maximum(lengths, model.lengths(removed, brought, aligned[stops]))
    position = np.arange(tokens)
    nearest = np.searchsorted(stops, position, side="right")  # 0: none in front of it
    distances = position - np.append(0, stops)[nearest]
    distances[nearest == 0] = tokens
    return distances, np.append(0, lengths)[nearest]
