"""Holds back edits that free too little for what the recovery behind them costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from langchain_core.messages.utils import count_tokens_approximately

from patchkv_agents.context import from_langchain
from patchkv_agents.errors import InputError
from patchkv_langchain.notes import Sign, sign
from patchkv_langchain.sources import recorded

if TYPE_CHECKING:
    from langchain_core.messages import AnyMessage, BaseMessage

Applied = set[tuple[Sign, Sign]]
"""Edits that the model has seen already: what a message was, and what it became."""


@dataclass(frozen=True, slots=True)
class FreedTokens:
    """An edit is worthwhile if what it saves in the calls to come outweighs the recovery.

    Both sides are in tokens that the model would have to compute:
    `removed * carried_cost * expected_calls >= suffix * recompute_share`.

    Attributes:
        expected_calls: calls of the model that are still to come.
        recompute_share: share of the tokens behind an edit that its recovery computes; 1 for an
            exact recovery.
        carried_cost: what a token in the context costs each call, as a share of what computing it
            costs: attention that reads it. Measure it for your model; the default is a guess.
    """

    expected_calls: int = 10
    recompute_share: float = 0.1
    carried_cost: float = 0.05

    def __call__(self, removed: int, suffix: int) -> bool:
        """Whether to make an edit that removes `removed` tokens before `suffix` others."""
        saved = removed * self.carried_cost * self.expected_calls
        return saved >= suffix * self.recompute_share


@dataclass(frozen=True, slots=True)
class EditBatching:
    """Holds back edits that are made for room alone, until together they are worth it.

    Only what `ContextEditingMiddleware` clears, and the arguments that deepagents truncates and
    messages of the user that it moves to files, are ever held back: never a summary, a correction
    or a redaction. What was made once stays.

    Args:
        max_tokens: no edit is held back where the messages would have more tokens than this. Leave
            room for the answer and the tool schemas below the model's limit.
        worthwhile: takes the tokens that the edits remove and the tokens behind the first of them,
            and says whether to make the edits now.
        count_tokens: counts the tokens of messages.

    Raises:
        InputError: `max_tokens` is not positive.
    """

    max_tokens: int
    worthwhile: Callable[[int, int], bool] = FreedTokens()
    count_tokens: Callable[[Sequence[BaseMessage]], int] = count_tokens_approximately

    def __post_init__(self) -> None:
        if self.max_tokens <= 0:
            raise InputError(f"max_tokens is {self.max_tokens}: use the most tokens to be shown")

    def batched(
        self, state: Sequence[AnyMessage], request: Sequence[AnyMessage], applied: Applied
    ) -> list[AnyMessage]:
        """The messages to show: those of `request`, or of `state` where an edit is held back.

        Args:
            state: the messages as the program has them.
            request: the same, edited for this call.
            applied: edits that were made in earlier calls; those made now are added.
        """
        shown = list(request)
        if len(state) != len(request):
            return shown  # messages came or went: not one by one what became of which
        new: dict[int, tuple[Sign, Sign]] = {}
        for index, (before, after) in enumerate(zip(state, request, strict=True)):
            if before is after or before == after:
                continue
            (old,), (now,) = (from_langchain([each], keep="shown") for each in (before, after))
            pair = sign(old), sign(now)
            record = recorded(after, old)
            if record is not None and record.frees and pair not in applied:
                new[index] = pair
        if not new:
            return shown
        held = [state[i] if i in new else message for i, message in enumerate(shown)]
        removed = self.count_tokens(held) - self.count_tokens(shown)
        suffix = self.count_tokens(shown[min(new) + 1 :])
        fits = self.count_tokens(held) <= self.max_tokens
        if fits and removed > 0 and not self.worthwhile(removed, suffix):
            return held
        applied.update(new.values())
        return shown
