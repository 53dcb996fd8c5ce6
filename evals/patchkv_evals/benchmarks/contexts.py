"""Edited contexts as token ids: the demo's episode, and edits of any place and size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from patchkv_agents.alignment import align
from patchkv_agents.context import render
from patchkv_agents.errors import InputError
from patchkv_agents.profiling.episode import EDIT_POSITION, build_episode
from patchkv_agents.ranges import IntArray
from patchkv_evals.errors import EpisodeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHORTEST, LONGEST = 3000, 8000
"""Between these lengths the demo's episode is as long as wanted, and its edit in its place."""
SURE = 5000
"""Tokens for which the episode has text with any tokenizer, however long its words are."""
CLOSE = 0.97
ENDS = 512
"""Tokens at both ends of a part that are not repeated where it has to be longer."""


@dataclass(frozen=True, slots=True, eq=False)
class EditedContext:
    """A context before and after an edit.

    Attributes:
        name: of the context.
        old, new: token ids, int64 `[tokens]`.
    """

    name: str
    old: IntArray
    new: IntArray

    @property
    def edit(self) -> tuple[int, int]:
        """First token of the first hunk in the new context, and new tokens of all hunks."""
        hunks = align(self.old, self.new).hunks
        if not hunks:
            raise EpisodeError(f"the two versions of {self.name} are the same: nothing to recover")
        return hunks[0].new_start, sum(hunk.new_stop - hunk.new_start for hunk in hunks)


def demo_context(tokenizer: PreTrainedTokenizerBase, tokens: int) -> EditedContext:
    """The demo's episode: one tool result at about one fifth is replaced by another.

    A shorter context than its text allows for is cut in the middle of what is in front of the edit
    and of what is behind it, a longer one repeats these middles; so the edit and its place are
    about the same at every length.

    Raises:
        InputError: it cannot be made that short.
    """
    old, new = _episode(tokenizer, min(max(tokens, SHORTEST), LONGEST))
    if CLOSE * tokens <= len(new) <= tokens:
        return EditedContext("demo", old, new)
    hunks = align(old, new).hunks
    start, behind = hunks[0].new_start, len(new) - hunks[-1].new_stop
    front = round(tokens * EDIT_POSITION)
    back = tokens - front - (len(new) - behind - start)
    if back < 2:
        raise InputError(f"the demo's edit does not fit into {tokens} tokens: use more")
    old, new = (
        np.concatenate(
            [_resized(ids[:start], front), ids[start:-behind], _resized(ids[-behind:], back)]
        )
        for ids in (old, new)
    )
    return EditedContext(f"demo, {'cut' if tokens < SHORTEST else 'repeated'}", old, new)


def _episode(tokenizer: PreTrainedTokenizerBase, tokens: int) -> tuple[IntArray, IntArray]:
    """The demo's episode before and after its edit; shorter where there is no more text."""

    def count(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int:
        return len(render(messages, tokenizer, tools=tools))

    try:
        episode = build_episode(tokens, count)
    except InputError:
        if tokens <= SURE:
            raise
        episode = build_episode(SURE, count)
    old, new = (
        render(messages, tokenizer, tools=episode.tools).token_ids
        for messages in (episode.old, episode.new)
    )
    return old, new


def _resized(ids: IntArray, tokens: int) -> IntArray:
    """Both ends of `ids`, and as much in the middle as gives `tokens` tokens in all."""
    if tokens <= len(ids):
        return np.concatenate([ids[: tokens // 2], ids[len(ids) - (tokens - tokens // 2) :]])
    middle = np.resize(ids[ENDS:-ENDS], tokens - 2 * ENDS)
    return np.concatenate([ids[:ENDS], middle, ids[-ENDS:]])


def spliced_context(
    tokenizer: PreTrainedTokenizerBase, tokens: int, *, position: float, edit_tokens: int
) -> EditedContext:
    """The demo's text, with a span of chosen place and size that had other text before.

    The old span has the same tokens the other way round, so that no copy of it is anywhere.

    Args:
        tokenizer: of the model.
        tokens: length of both versions.
        position: where the span starts, as a share of the context.
        edit_tokens: length of the span.

    Raises:
        InputError: the span does not lie inside the context.
    """
    new = demo_context(tokenizer, tokens).new
    start = round(position * len(new))
    if not 0 <= start < start + edit_tokens < len(new):
        raise InputError(
            f"an edit of {edit_tokens} tokens at {position:.0%} does not fit into "
            f"{len(new)} tokens: choose a smaller or earlier one"
        )
    old = new.copy()
    old[start : start + edit_tokens] = new[start : start + edit_tokens][::-1]
    return EditedContext("demo, spliced", old, new)
