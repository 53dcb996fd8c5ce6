"""What a recovery method is, an object that chooses rows and runs them; and an attention rule.

A method is one frozen dataclass in one file, with the numbers it needs and no others, and an entry
in `registry.py`. NumPy only, so that policies can be made without torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from patchkv_agents.alignment import Alignment
from patchkv_agents.checkpoint.block_map import BlockMap
from patchkv_agents.errors import InputError
from patchkv_agents.ranges import BoolArray, FloatArray, IntArray, RowSet, ranked, within
from patchkv_agents.recovery.plan import RecoveryPlan, RowLabel

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

    def edit_mass(self) -> FloatArray | None:
        """Attention of each token's block to the edits, float32 `[tokens]`; None without a map."""
        if self.block_map is None or not self.block_map.mass.any():
            return None
        return self.block_map.edit_mass(self.alignment)[self.old // self.block_map.block_size]

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

    def plan(
        self,
        alignment: Alignment,
        *,
        origins: npt.NDArray[np.int16],
        available: BoolArray,
        scores: npt.NDArray[np.float32],
        block_map: BlockMap | None = None,
    ) -> RecoveryPlan:
        """Label every token of a new version, before any KV work starts.

        Blocks that moved out of order are computed as new tokens are. Restored behind windows of
        their own they made first-token KL 1.6 to 109 times larger (median 14; six edits that move
        one call and its result of 290 to 830 tokens in contexts of 2,500 to 4,000, SmolLM2-135M),
        and larger than a plan that computes them and as many rows has in five of the six.

        Args:
            alignment: of the old version's tokens with the new version's.
            origins: origin of each old row (0 is exact), int16 `[tokens_old]`.
            available: old rows whose keys and values exist somewhere, bool `[tokens_old]`.
            scores: attention received by each old token, float32 `[tokens_old]`.
            block_map: where the old version's blocks looked, where that is known.
        """
        tokens = alignment.tokens_new
        aligned = alignment.position_map()
        old = np.where(aligned >= 0, aligned, 0)
        if alignment.tokens_old:
            aligned[(aligned >= 0) & ~available[old]] = -1
        has_state = aligned >= 0
        exact = has_state & (origins[old] == 0) if alignment.tokens_old else has_state

        unchanged = has_state & (np.arange(tokens) < alignment.prefix)
        labels = np.full(tokens, RowLabel.NEW, dtype=np.int8)
        labels[has_state] = RowLabel.RESTORED
        labels[unchanged & exact] = RowLabel.PREFIX
        restorable = labels == RowLabel.RESTORED
        if restorable.any():
            repair = self.repair(
                OldRows(alignment, restorable, has_state & ~unchanged, old, scores, block_map)
            )
            labels[repair.window] = RowLabel.WINDOW
            labels[repair.tail] = RowLabel.TAIL
            labels[repair.attention] = RowLabel.ATTENTION
        if labels[-1] in (RowLabel.PREFIX, RowLabel.RESTORED):
            labels[-1] = RowLabel.TAIL
        return RecoveryPlan(labels, aligned, alignment.prefix)

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


@dataclass(frozen=True, slots=True)
class AttentionRule(ABC):
    """Base of the rules: whole blocks, ranked by the largest value of a token in them.

    Attributes:
        fraction: share of the suffix that may be recomputed by the rule (kappa).

    Raises:
        InputError: the share is out of its range.
    """

    fraction: float

    @property
    @abstractmethod
    def kind(self) -> str:
        """Names the class in files."""

    @property
    def needs_map(self) -> bool:
        """Whether it asks where the blocks of the old version looked."""
        return False

    def __post_init__(self) -> None:
        if not 0.0 <= self.fraction <= 1.0:
            raise InputError(f"fraction is {self.fraction}: use 0 to 1")

    def blocks(self, suffix_tokens: int, block_size: int) -> int:
        """Most blocks that it takes."""
        return ceil(self.fraction * suffix_tokens / block_size)

    @abstractmethod
    def values(self, rows: OldRows) -> FloatArray:
        """By what tokens are ranked, float32 `[tokens]`; those at 0 are not chosen."""

    def reserved(self, rows: OldRows, candidates: BoolArray, block_size: int) -> int:
        """Blocks for which windows leave room: no more than there are to choose."""
        blocks = self.blocks(int(rows.suffix.sum()), block_size)
        return min(blocks, len(ranked(self.values(rows), candidates, block_size))) if blocks else 0

    def choose(
        self, rows: OldRows, candidates: BoolArray, block_size: int, *, blocks: int, room: int
    ) -> BoolArray:
        """The rows that are recomputed, bool `[tokens]`.

        Args:
            rows: of the new version.
            candidates: outside of window and tail, bool `[tokens]`.
            block_size: in tokens.
            blocks: most blocks, as `reserved` gave them.
            room: most rows.
        """
        if not blocks:
            return np.zeros(rows.tokens, dtype=bool)
        order = ranked(self.values(rows), candidates, block_size)[:blocks]
        return within(order, candidates, block_size, room)

    def arrange(
        self, rows: OldRows, repair: Repair, distances: IntArray, block_size: int
    ) -> Repair:
        """The repair set with its rows where the rule wants them.

        Args:
            rows: of the new version.
            repair: window, tail and the rule's own rows.
            distances: of each token from the edit in front of it, int64 `[tokens]`.
            block_size: in tokens.
        """
        return repair

    def finish(
        self,
        plan: RecoveryPlan,
        logits: torch.Tensor,
        runner: RowRunner,
        *,
        block_size: int,
        room: int,
    ) -> tuple[torch.Tensor, RecoveryPlan]:
        """Run what is chosen only once the rows of the plan have run.

        Args:
            plan: all of its rows have run.
            logits: of the last row, `[vocab]`.
            runner: has run them.
            block_size: in tokens.
            room: most rows of the suffix that may be computed beside the plan's.

        Returns:
            Logits of the last row, and the plan as carried out.
        """
        return logits, plan
