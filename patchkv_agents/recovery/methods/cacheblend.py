"""CacheBlend (arXiv 2405.16444): recompute the rows whose values the edit changed most.

From the stale state of the whole old context, moved: every row behind the exact prefix runs through
the layers in front of the check layer, and through that layer up to its keys and values. These are
compared with the restored ones and take their places. From there on only the rows that differ most
run, with the new tokens and the query tail (sections 4.2 and 4.3). The public code takes the whole
question as tail; an edited context often ends with an old question, so that here the last 32 tokens
are taken, about the length of a question.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import TYPE_CHECKING, Literal

import numpy as np

from patchkv_agents.errors import InputError
from patchkv_agents.ranges import BoolArray, RowSet
from patchkv_agents.recovery.methods.base import Method, OldRows, Repair, RowRunner
from patchkv_agents.recovery.plan import RecoveryPlan, RowLabel

if TYPE_CHECKING:
    import torch


class BlendScore(str, Enum):
    """By what the rows are found that the edit changed most."""

    VALUE = "value"
    """Squared difference of fresh and restored values, summed over heads and channels."""
    KEY = "key"
    """The same of keys, rotated to their new positions: what LMCache's blender compares."""


class BlendMask(str, Enum):
    """Which keys the rows see from the check layer on."""

    CAUSAL = "causal"
    """A row sees the keys up to its own position."""
    BOTTOM_RIGHT = "bottom_right"
    """Row i of n sees the keys up to m - n + i of m: what the public code does, in which rows see
    later keys. For comparison only."""


@dataclass(frozen=True, slots=True)
class CacheBlend(Method):
    """Chooses rows by how far their state deviates, while they run.

    Up to the check layer, the cache holds fresh keys and values of all rows afterwards: they are at
    hand, and the authors' code keeps them too. The checkpoint refers to the restored ones.

    Attributes:
        ratio: share of the scored rows, which are the suffix without the query tail, that goes on.
        check_layer: index of the layer that compares, at least 1: nothing differs in layer 0.
        score: what is compared.
        mask: which keys the rows see from there on.
        tail_tokens: length of the query tail, in tokens.

    Raises:
        InputError: a value is out of its range.
    """

    ratio: float = 0.16
    check_layer: int = 1
    score: BlendScore = BlendScore.VALUE
    mask: BlendMask = BlendMask.CAUSAL
    tail_tokens: int = 32
    kind: Literal["cacheblend"] = "cacheblend"

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio <= 1.0:
            raise InputError(f"ratio is {self.ratio}: use 0 to 1")
        if self.check_layer < 1:
            raise InputError(f"check_layer is {self.check_layer}: use 1 or more")
        if self.tail_tokens < 1:
            raise InputError(f"tail_tokens is {self.tail_tokens}: the last token is always needed")

    def repair(self, rows: OldRows) -> Repair:
        """The query tail; the other rows are chosen while they run."""
        tail = np.arange(rows.tokens) >= rows.tokens - self.tail_tokens
        return Repair(rows.none(), tail & rows.suffix, rows.none())

    def run(self, plan: RecoveryPlan, runner: RowRunner) -> tuple[torch.Tensor, RecoveryPlan]:
        """Run the rows of a plan and those whose state deviates most from the restored.

        Raises:
            InputError: the model has no such check layer.
            UnsupportedModelError: the model has no plain list of layers.
        """
        import torch

        check = self.check_layer
        if check >= runner.layers:
            raise InputError(
                f"check_layer is {check}, but the model has {runner.layers} layers: use a smaller "
                "one"
            )
        behind = ~plan.kept
        behind[plan.prefix :] = True
        scored = (plan.labels == RowLabel.RESTORED) & behind
        if not scored.any():
            return runner.run(plan.rows), plan
        hidden, deviation = runner.run_to_layer(RowSet.of_mask(behind), check, self._deviation)
        chosen = _largest(deviation, behind, scored, self.ratio)

        computed = ~plan.kept | chosen
        rows = RowSet.of_mask(computed)
        seen_as = None
        if self.mask is BlendMask.BOTTOM_RIGHT:
            tokens = len(plan.labels)
            bottom_right = RowSet.of_range(tokens - len(rows), tokens)
            seen_as = None if bottom_right == rows else bottom_right
        packed = torch.from_numpy(np.flatnonzero(computed[behind])).to(hidden.device)
        logits = runner.run_from_layer(rows, check, hidden[:, packed], seen_as=seen_as)
        full_layers = check / runner.layers
        return logits, plan.blended(chosen, full_layers=full_layers, sees_later=seen_as is not None)

    def _deviation(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        old_keys: torch.Tensor,
        old_values: torch.Tensor,
    ) -> torch.Tensor:
        """Squared difference of fresh and restored rows, over heads and channels, `[rows]`."""
        by_key = self.score is BlendScore.KEY
        fresh, old = (keys, old_keys) if by_key else (values, old_values)
        return (fresh.float() - old.float()).square().sum((0, 2))

    def expected_rows(self, *, new: int, suffix: int, layers: int) -> float:
        """All rows up to the check layer, then the chosen ones and the tail."""
        selected = min(suffix, ceil(self.ratio * suffix) + self.tail_tokens)
        first = self.check_layer / layers
        return new + first * suffix + (1 - first) * selected

    def describe(self) -> Iterator[str]:
        """What is compared, and how many rows go on."""
        yield (
            f"recomputed are the {self.ratio:.0%} of the rows whose {self.score.value}s in layer "
            f"{self.check_layer} differ most from the old ones, and the last {self.tail_tokens} "
            "tokens"
        )


def _largest(
    deviation: torch.Tensor, behind: BoolArray, scored: BoolArray, ratio: float
) -> BoolArray:
    """The share `ratio` of the scored tokens that deviate most, bool `[tokens]`.

    Args:
        deviation: of the tokens in `behind`, `[rows]`.
        behind, scored: bool `[tokens]`; every scored token is in `behind`.
        ratio: how many, rounded down.
    """
    import torch

    candidates = torch.from_numpy(np.flatnonzero(scored[behind])).to(deviation.device)
    best = deviation[candidates].topk(int(ratio * len(candidates))).indices.cpu().numpy()
    chosen = np.zeros(len(scored), dtype=bool)
    chosen[np.flatnonzero(scored)[best]] = True
    return chosen
