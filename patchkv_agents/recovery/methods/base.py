"""What a recovery method is: an object that chooses rows, and runs them.

A method is one frozen dataclass in one file, with the numbers it needs and no others, and an entry
in `registry.py`. NumPy only, so that policies can be made without torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from patchkv_agents.alignment import Alignment
from patchkv_agents.checkpoint.block_map import BlockMap
from patchkv_agents.ranges import BoolArray, IntArray, RowSet
from patchkv_agents.recovery.plan import RecoveryPlan
from patchkv_agents.recovery.ranking import FloatArray

if TYPE_CHECKING:
    import torch

    Compare = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """Gets fresh keys and values and the restored ones in their places, all
    `[kv_heads, rows, head_dim]`; returns a figure for each row, `[rows]`."""


@dataclass(frozen=True, slots=True, eq=False)
class OldRows:
    """The rows of a new version that have old state, and what is known about them.

    Attributes:
        alignment: of the old version's tokens with the new version's.
        restorable: rows that would be restored: all that are not exact in place, bool `[tokens]`.
        suffix: rows with old state behind the first edit, bool `[tokens]`.
        old: old position of each token, anything where it has none; int64 `[tokens]`.
        scores: attention received by each old token, float32 `[tokens_old]`.
        block_map: where the old version's blocks looked; None where that is not known.
    """

    alignment: Alignment
    restorable: BoolArray
    suffix: BoolArray
    old: IntArray
    scores: FloatArray
    block_map: BlockMap | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of the new version."""
        return len(self.suffix)

    def none(self) -> BoolArray:
        """A mask without any row, bool `[tokens]`."""
        return np.zeros(self.tokens, dtype=bool)


@dataclass(frozen=True, slots=True, eq=False)
class Repair:
    """The repair set R, as disjoint masks over the new version's tokens, bool `[tokens]`."""

    window: BoolArray
    tail: BoolArray
    attention: BoolArray


class RowRunner(Protocol):
    """The model, for a method that runs the rows of a plan. The cache has the restored rows."""

    @property
    def layers(self) -> int:
        """Number of the model's layers."""

    def run(self, rows: RowSet, *, again: bool = False) -> torch.Tensor:
        """Run rows through the model; returns the logits of the last one, `[vocab]`.

        Args:
            rows: in ascending order.
            again: they have run before, so that their attention does not count twice.
        """

    def attention(self) -> FloatArray:
        """Attention that the last prompt rows gave to each token, float32 `[tokens]`."""

    def run_to_layer(
        self, rows: RowSet, layer: int, compare: Compare
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows up to the keys and values of a layer, which take their places in the cache.

        Args:
            rows: that run.
            layer: index of the layer, at least 1.
            compare: called for parts of the rows, with that layer's keys and values.

        Returns:
            The input of that layer, `[1, rows, hidden]`, and what `compare` gave, `[rows]`.

        Raises:
            UnsupportedModelError: the model has no plain list of layers.
        """

    def run_from_layer(
        self, rows: RowSet, layer: int, hidden: torch.Tensor, *, seen_as: RowSet | None
    ) -> torch.Tensor:
        """Run rows from a layer on; returns the logits of the last one, `[vocab]`.

        Args:
            rows: that run.
            layer: index of the first layer that runs.
            hidden: its input, `[1, rows, hidden]`.
            seen_as: positions whose keys each row may see, in place of its own; then attention
                is not collected.
        """


class Method(ABC):
    """Base of the methods: chooses which old rows are recomputed, and runs what is computed."""

    __slots__ = ()

    @property
    @abstractmethod
    def kind(self) -> str:
        """Names the class in files."""

    @property
    def is_exact(self) -> bool:
        """Whether every row behind an edit is recomputed."""
        return False

    @property
    def needs_map(self) -> bool:
        """Whether it asks where the blocks of the old version looked."""
        return False

    @abstractmethod
    def repair(self, rows: OldRows) -> Repair:
        """The rows that are computed again, fixed before any KV work starts."""

    def run(self, plan: RecoveryPlan, runner: RowRunner) -> tuple[torch.Tensor, RecoveryPlan]:
        """Run the rows of a plan.

        Returns:
            Logits of the last row, `[vocab]`, and the plan as carried out: some methods choose
            further rows while they run.
        """
        return runner.run(plan.rows), plan

    @abstractmethod
    def expected_rows(self, *, new: int, suffix: int, layers: int) -> float:
        """Rows that would run behind an edit, a mean over the layers, by sizes alone.

        Args:
            new: tokens without old state; the edit removes as many.
            suffix: tokens behind the edit.
            layers: of the model.
        """

    @abstractmethod
    def describe(self) -> Iterator[str]:
        """What it recomputes, in words, a line for each part."""
