"""The recovery plan: which rows of a new version are kept, restored and computed, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from patchkv_agents.ranges import BoolArray, IntArray, RowSet


class RowLabel(IntEnum):
    """What happens to a row of the new version, and why."""

    PREFIX = 0
    """Exact state from before the first edit: kept."""
    NEW = 1
    """No old state: computed."""
    WINDOW = 2
    """Behind an edit, closer than the dirty window is long: recomputed. An exact policy's window
    is everything that is not exact."""
    TAIL = 3
    """Among the last prompt tokens: recomputed."""
    ATTENTION = 4
    """Chosen by its attention, by the method's rule: recomputed."""
    RESTORED = 5
    """Old state that is not exact: moved behind an edit, or quantised in front of it."""
    DEVIATION = 6
    """Chosen while it ran, because its state differed most from the old one: recomputed."""


@dataclass(frozen=True, slots=True, eq=False)
class RecoveryPlan:
    """One label for each token of the new version.

    Attributes:
        labels: `RowLabel` of each token, int8 `[tokens]`.
        aligned: old position of each token, whether its state is used or not, -1 where it is new
            or its state is lost; int64 `[tokens]`.
        prefix: new tokens before the first edit.
        full_layers: share of the model's layers through which every row behind the prefix ran, not
            only those that are computed to the end.
        sees_later: whether computed rows saw keys behind their own positions.
        run_twice: rows that ran a second time, because rows in front of them were chosen late.
    """

    labels: npt.NDArray[np.int8]
    aligned: IntArray
    prefix: int
    full_layers: float = 0.0
    sees_later: bool = False
    run_twice: int = 0

    def __post_init__(self) -> None:
        self.labels.setflags(write=False)
        self.aligned.setflags(write=False)

    @property
    def kept(self) -> BoolArray:
        """Rows that are not computed, bool `[tokens]`."""
        kept: BoolArray = (self.labels == RowLabel.PREFIX) | (self.labels == RowLabel.RESTORED)
        return kept

    @property
    def source(self) -> IntArray:
        """Old position whose state a row keeps, -1 where it is computed; int64 `[tokens]`."""
        return np.where(self.kept, self.aligned, -1)

    @property
    def suffix(self) -> BoolArray:
        """S: the aligned tokens after the first edit, bool `[tokens]`."""
        return (self.aligned >= 0) & (np.arange(len(self.labels)) >= self.prefix)

    @property
    def rows(self) -> RowSet:
        """The rows that run through the model."""
        return RowSet.of_mask(~self.kept)

    @property
    def is_exact(self) -> bool:
        """Whether the result is that of a full prefill."""
        return not (self.sees_later or bool((self.labels == RowLabel.RESTORED).any()))

    def count(self, label: RowLabel) -> int:
        """Number of tokens with this label."""
        return int(np.count_nonzero(self.labels == label))

    @property
    def recompute_ratio(self) -> float:
        """Rows that run / rows behind the common prefix, a mean over the layers.

        1 too where nothing is behind it, or where rows of the prefix have to run again. Rows that
        ran twice count twice; without them, it is at most 1.
        """
        rows = len(self.rows)
        to_the_end = (rows + self.run_twice) / max(len(self.labels) - self.prefix, rows)
        return self.full_layers + (1 - self.full_layers) * to_the_end

    @property
    def repair_ratio(self) -> float:
        """Share of the suffix that is recomputed; 0 without a suffix."""
        suffix = self.suffix
        return float((suffix & ~self.kept).sum() / suffix.sum()) if suffix.any() else 0.0

    def origins(self, old: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
        """Origin of each row once the plan has run, coded as in `Checkpoint.origins`.

        A computed row is exact only if every row it sees is. A row that was restored across an
        edit ages by one generation; one that was restored without being exact (quantised) stays
        what it is in front of the first edit.

        Args:
            old: origins of the old version, int16 `[tokens_old]`.
        """
        tokens = len(self.labels)
        origins = np.zeros(tokens, dtype=np.int16)
        if self.is_exact:
            return origins
        restored = self.labels == RowLabel.RESTORED
        inexact = ~self.kept
        if not self.sees_later:
            inexact[: int(np.argmax(restored))] = False
        origins[inexact] = 1
        before = old[self.source[restored]]
        behind_edit = np.flatnonzero(restored) >= self.prefix
        origins[restored] = np.where(behind_edit, np.maximum(before, 1) + 1, before)
        return origins

    def extended(self, rows: BoolArray, label: RowLabel) -> RecoveryPlan:
        """The plan with those of `rows` (bool `[tokens]`) computed that it restores so far."""
        labels = self.labels.copy()
        labels[rows & (labels == RowLabel.RESTORED)] = label
        return replace(self, labels=labels)

    def blended(self, chosen: BoolArray, *, full_layers: float, sees_later: bool) -> RecoveryPlan:
        """The plan as it was carried out, with the rows that were chosen while it ran.

        Args:
            chosen: restored rows that were recomputed after all, bool `[tokens]`.
            full_layers, sees_later: see the attributes.
        """
        plan = self.extended(chosen, RowLabel.DEVIATION)
        return replace(plan, full_layers=full_layers, sees_later=sees_later)
