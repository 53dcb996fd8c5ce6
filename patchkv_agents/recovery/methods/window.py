"""A window behind each edit, the query tail, and rows chosen by attention: PatchKV's own method."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from patchkv_agents.alignment import Alignment
from patchkv_agents.errors import InputError
from patchkv_agents.ranges import BoolArray, IntArray, ranked, rounded_to_blocks, within
from patchkv_agents.recovery.methods.base import Method, OldRows, Repair, RowRunner
from patchkv_agents.recovery.methods.rules import Rule
from patchkv_agents.recovery.plan import RecoveryPlan

if TYPE_CHECKING:
    import torch


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


@dataclass(frozen=True, slots=True)
class Window(Method):
    """Recomputes what is near an edit, what is near the end, and what attention points to.

    The query tail comes first. Of what `max_repaired` leaves, the rows of `rule` have their share
    and the windows take the rest, nearest blocks of all edits first; in whole blocks, so that a
    little may be left over. The tail counts, and is computed even if it alone passes the limit.

    Attributes:
        window_tokens: length of the dirty window behind each edit, in tokens. With `window_model`,
            the shortest that it may predict.
        tail_tokens: length of the query tail, in tokens; 1 is the last token alone, which gives
            the logits and is not grown to a block.
        block_size: unit of repair, in tokens; 1 turns block rounding off.
        rule: chooses further rows by attention, if given.
        window_model: predicts the length of the window behind each edit, if given.
        max_repaired: largest share of the suffix that is recomputed, the tail included, which
            alone may pass it. Where windows would pass it, the blocks nearest to the edits are
            taken. None is no limit.

    Raises:
        InputError: a value is out of its range.
    """

    window_tokens: int
    tail_tokens: int = 64
    block_size: int = 1
    rule: Rule | None = None
    window_model: WindowModel | None = None
    max_repaired: float | None = None
    kind: Literal["window"] = "window"

    def __post_init__(self) -> None:
        if self.window_tokens < 0:
            raise InputError(f"window_tokens is {self.window_tokens}: use 0 or more")
        if self.tail_tokens < 1:
            raise InputError(f"tail_tokens is {self.tail_tokens}: the last token is always needed")
        if self.block_size < 1:
            raise InputError(f"block_size is {self.block_size}: use 1 or more")
        if self.max_repaired is not None and not 0.0 < self.max_repaired <= 1.0:
            raise InputError(f"max_repaired is {self.max_repaired}: use more than 0, up to 1")

    @property
    def needs_map(self) -> bool:
        """Whether the rule asks where the blocks of the old version looked."""
        return self.rule is not None and self.rule.needs_map

    def repair(self, rows: OldRows) -> Repair:
        """Window, tail and the rows of the rule."""
        suffix, block = rows.suffix, self.block_size
        if not suffix.any():
            return Repair(rows.none(), rows.none(), rows.none())
        tail = np.arange(rows.tokens) >= rows.tokens - self.tail_tokens
        if self.tail_tokens > 1:
            tail = rounded_to_blocks(tail, block)
        tail &= suffix
        room = max(0, self._limit(suffix) - int(tail.sum()))

        distances, lengths = window_distances(
            rows.alignment, suffix, least=self.window_tokens, model=self.window_model
        )
        window = rounded_to_blocks((distances < lengths) & suffix, block) & suffix
        open_window = window & ~tail
        blocks = 0 if self.rule is None else self.rule.reserved(rows, suffix & ~tail, block)
        others = int((suffix & ~window & ~tail).sum())
        if int(open_window.sum()) + min(blocks * block, others) > room:
            # What is cut off the windows is then a candidate for its attention like any other row.
            nearest = ranked(rows.tokens - distances, open_window, block)
            cut = within(nearest, open_window, block, max(0, room - blocks * block))
            window = (window & tail) | cut
        room -= int((window & ~tail).sum())

        if self.rule is None:
            return Repair(window, tail & ~window, rows.none())
        candidates = suffix & ~window & ~tail
        attention = self.rule.choose(rows, candidates, block, blocks=blocks, room=room)
        repair = Repair(window, tail & ~window, attention)
        return self.rule.arrange(rows, repair, distances, block)

    def run(self, plan: RecoveryPlan, runner: RowRunner) -> tuple[torch.Tensor, RecoveryPlan]:
        """Run the rows of a plan, and those that the rule chooses afterwards."""
        logits = runner.run(plan.rows)
        if self.rule is None:
            return logits, plan
        room = self.room(plan)
        return self.rule.finish(plan, logits, runner, block_size=self.block_size, room=room)

    def room(self, plan: RecoveryPlan) -> int:
        """Rows of the suffix that may be computed beside those that the plan computes."""
        return max(0, self._limit(plan.suffix) - int((plan.suffix & ~plan.kept).sum()))

    def _limit(self, suffix: BoolArray) -> int:
        share = 1.0 if self.max_repaired is None else self.max_repaired
        return int(share * int(suffix.sum()))

    def expected_rows(self, *, new: int, suffix: int, layers: int) -> float:
        """Window, tail and the rule's blocks, within the limit."""
        window = self.window_tokens
        if self.window_model is not None:
            window = max(window, self.window_model.length(new, new, suffix))
        window = min(suffix, window)
        blocks = 0 if self.rule is None else self.rule.blocks(suffix, self.block_size)
        # Window and tail are rounded to blocks: on average, by half a block at their inner end.
        rounding = (self.block_size - 1) / 2 * ((window > 0) + (self.tail_tokens > 1))
        repaired = window + self.tail_tokens + rounding + blocks * self.block_size
        if self.max_repaired is not None:
            repaired = min(repaired, max(self.max_repaired * suffix, self.tail_tokens))
        return new + min(suffix, repaired)

    def describe(self) -> Iterator[str]:
        """A line for each part."""
        if self.rule is not None and self.rule.kind == "contiguous":
            yield (
                "recomputed are, behind each edit, as many tokens as these lengths have, in one "
                "piece, and the last token:"
            )
        if self.window_model is not None:
            least = f", at least {self.window_tokens}" if self.window_tokens else ""
            yield f"recomputed are, behind each edit, as many tokens as its size predicts{least}"
        else:
            yield f"recomputed are, behind each edit, {_tokens(self.window_tokens)}"
        if self.rule is not None and self.rule.fraction:
            yield (
                f"further blocks, up to {self.rule.fraction:.1%} of the suffix, by the rule "
                f"'{self.rule.kind}'"
            )
        yield f"of the query tail, {_tokens(self.tail_tokens)}"
        yield f"repair goes by blocks of {_tokens(self.block_size)}"
        if self.max_repaired is not None:
            yield f"together, at most {self.max_repaired:.0%} of the suffix"


def _tokens(count: int) -> str:
    return f"{count:,} token" + ("" if count == 1 else "s")
