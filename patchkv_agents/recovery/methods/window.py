"""A window behind each edit, the query tail, and rows chosen by attention: PatchKV's own method."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from patchkv_agents.errors import InputError
from patchkv_agents.ranges import BoolArray, rounded_to_blocks
from patchkv_agents.recovery.methods.base import Method, OldRows, Repair, RowRunner
from patchkv_agents.recovery.methods.rules import Rule
from patchkv_agents.recovery.plan import RecoveryPlan
from patchkv_agents.recovery.ranking import ranked, within
from patchkv_agents.recovery.window import WindowModel, window_distances

if TYPE_CHECKING:
    import torch


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
