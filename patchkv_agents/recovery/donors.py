"""Choosing the stored version that leaves least to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from patchkv_agents.alignment import align
from patchkv_agents.checkpoint import Checkpoint
from patchkv_agents.ranges import BoolArray, IntArray
from patchkv_agents.recovery.plan import RecoveryPlan, RowLabel
from patchkv_agents.recovery.policy import RecoveryPolicy

Anchors = Sequence[tuple[tuple[int, int], tuple[int, int]]]
"""Token spans, old and new, of messages that are the same (see `alignment.align`)."""
AnchorsOf = Callable[[str], Anchors]
"""The anchors between a version, by its name, and the context to recover."""


OwnOf = Callable[[str, int], BoolArray | None]
"""Of a version, by its name and number of tokens, the rows that the context's own line made, bool
`[tokens]`; None if it made all of them."""


def no_anchors(_version: str) -> Anchors:
    """Nothing is known of messages."""
    return ()


def all_own(_version: str, _tokens: int) -> None:
    """There is one line only."""


MAX_ALIGNED = 2
"""Stored versions that are aligned and planned for, beside the current one."""
SWITCH_ROWS = 32
"""Leaving a live cache restores every row anew: it has to save more computed rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Donor:
    """A version from which a context can be recovered.

    Attributes:
        version: its name.
        checkpoint: its tokens and state.
        is_live: whether all its rows lie in a cache, stored or not.
        own: rows that the line of the context to recover made, bool `[tokens]`; None if all. Of the
            others, those of a common beginning are used, which saw nothing else.
    """

    version: str
    checkpoint: Checkpoint
    is_live: bool = False
    own: BoolArray | None = None

    def usable(self, token_ids: IntArray) -> BoolArray:
        """Rows that exist and may go into a recovery of `token_ids`, bool `[tokens_old]`."""
        old = self.checkpoint
        usable = np.ones(len(old), dtype=bool) if self.is_live else old.stored
        if self.own is not None:
            usable &= self.own | (np.arange(len(old)) < old.clean_prefix(token_ids))
        return usable

    def plan(
        self, token_ids: IntArray, policy: RecoveryPolicy, anchors_of: AnchorsOf
    ) -> RecoveryPlan:
        """What a recovery of `token_ids` (int64 `[tokens]`) from this version would do."""
        old = self.checkpoint
        return policy.method.plan(
            align(old.token_ids, token_ids, anchors=anchors_of(self.version)),
            origins=old.origins,
            available=self.usable(token_ids),
            scores=old.scores,
            block_map=old.block_map,
        )


def choose_donor(
    current: Donor,
    others: Iterable[tuple[int, Donor]],
    token_ids: IntArray,
    policy: RecoveryPolicy,
    anchors_of: AnchorsOf = no_anchors,
) -> tuple[Donor, RecoveryPlan]:
    """The donor whose plan computes fewest rows, and that plan.

    Among plans that compute as many, the one that restores fewest inexact rows is taken, then
    `current`, then the first.

    Args:
        current: the state at hand.
        others: further donors, each with a bound on the tokens that it can save, largest first.
        token_ids: of the context to recover, int64 `[tokens]`.
        policy: how much is recomputed.
        anchors_of: which messages of a donor are in the context unchanged, as far as known.
    """
    chosen, plan = current, current.plan(token_ids, policy, anchors_of)
    least = _cost(plan)
    if current.is_live:
        least = least[0] - SWITCH_ROWS, least[1]
    for tried, (bound, donor) in enumerate(others):
        if tried == MAX_ALIGNED or len(token_ids) - bound > least[0]:
            break
        other = donor.plan(token_ids, policy, anchors_of)
        if _cost(other) < least:
            chosen, plan, least = donor, other, _cost(other)
    return chosen, plan


def _cost(plan: RecoveryPlan) -> tuple[int, int]:
    return len(plan.rows), plan.count(RowLabel.RESTORED)
