"""Known causes for which the common prefix of two versions ends, and what to do about each."""

from __future__ import annotations

from enum import Enum


class Cause(str, Enum):
    """Why a prefix ended. `summary` says it in words, `remedy` what to do; both are one line."""

    NOTHING_LOST = "nothing_lost"
    VOLATILE_TEXT = "volatile_text"
    TOOLS_REORDERED = "tools_reordered"
    TOOLS_RESERIALIZED = "tools_reserialized"
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_ARGS_CHANGED = "template_args_changed"
    TEMPLATE_DROPS_REASONING = "template_drops_reasoning"
    TEMPLATE_MOVES_TOOLS = "template_moves_tools"
    TEMPLATE_REWRITES = "template_rewrites"
    SYSTEM_REWRITTEN = "system_rewritten"
    RESERIALIZED = "reserialized"
    REASONING_DROPPED = "reasoning_dropped"
    TEXT_MOVED = "text_moved"
    RESULTS_CLEARED = "results_cleared"
    RESULT_REPLACED = "result_replaced"
    FRONT_TRIMMED = "front_trimmed"
    SUMMARIZED = "summarized"
    TRUNCATED = "truncated"
    REDACTED = "redacted"
    DELETED = "deleted"
    INSERTED = "inserted"
    CHANGED = "changed"

    def __str__(self) -> str:
        return self.value

    @property
    def summary(self) -> str:
        """What happened."""
        return _TEXTS[self][0]

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return _TEXTS[self][1]


_TEXTS = {
    Cause.NOTHING_LOST: (
        "nothing that was there before has changed",
        "Nothing: an exact prefix cache serves this step.",
    ),
    Cause.VOLATILE_TEXT: (
        "a time, counter or id changed in text that is otherwise the same",
        "Keep it out of the part that stays: write it into the newest message, or let the model "
        "ask a tool for it; or write it once and leave it.",
    ),
    Cause.TOOLS_REORDERED: (
        "the tool list came in another order",
        "Sort the tools before each call, for example by name: sets and parallel discovery give "
        "another order each time.",
    ),
    Cause.TOOLS_RESERIALIZED: (
        "the same tool schemas were written in another form",
        "Build each schema once and pass the same object each time: key order and spacing are part "
        "of the prompt.",
    ),
    Cause.TOOLS_CHANGED: (
        "the tool list changed",
        "Show the same tools during the whole episode and restrict the choice by other means "
        "(`tool_choice`, a line in the newest message).",
    ),
    Cause.TEMPLATE_ARGS_CHANGED: (
        "the arguments of the chat template changed",
        "Pass the same template arguments at each call of an episode.",
    ),
    Cause.TEMPLATE_DROPS_REASONING: (
        "the chat template no longer shows the reasoning of an earlier turn",
        "Some templates do this at each new user message. If yours has an argument that keeps "
        "reasoning, set it; otherwise only recovery avoids the loss.",
    ),
    Cause.TEMPLATE_MOVES_TOOLS: (
        "the chat template shows the tools at another place than before",
        "Some templates put the tools before the last user message, which moves at each turn. If "
        "yours has an argument for their place, put them into the head.",
    ),
    Cause.TEMPLATE_REWRITES: (
        "the chat template shows an unchanged message in another way",
        "Look into the template for what depends on later messages or on the date; an argument of "
        "the template may fix it.",
    ),
    Cause.SYSTEM_REWRITTEN: (
        "the system prompt was rewritten",
        "Keep the system prompt as it is during an episode; put what changes (state, memory, the "
        "present task) into the newest message.",
    ),
    Cause.RESERIALIZED: (
        "the same values were written in another form",
        "Keep the text as it first was: pass on the model's own argument string instead of parsing "
        "and writing it again, and normalise text before it first enters the context.",
    ),
    Cause.REASONING_DROPPED: (
        "reasoning was taken out of an earlier turn",
        "Drop reasoning right after the turn that made it, or keep it for the whole episode.",
    ),
    Cause.TEXT_MOVED: (
        "text moved from one place to another",
        "Leave the copy where it is and repeat the text at the end; taking a reminder out of an "
        "earlier message costs everything behind it.",
    ),
    Cause.RESULTS_CLEARED: (
        "an old tool result was cleared",
        "Clear seldom and many at once (from a token threshold on), so that the loss comes once "
        "and not at each turn; or shorten results before they first enter the context.",
    ),
    Cause.RESULT_REPLACED: (
        "a tool result was replaced",
        "Append the fresh result as a new message instead, where the old one may stay; otherwise "
        "let recovery keep what follows it.",
    ),
    Cause.FRONT_TRIMMED: (
        "the oldest messages were dropped",
        "Drop many at once and seldom: a window that slides at each turn loses the prefix at each "
        "turn. Counts of what was dropped belong into the newest message.",
    ),
    Cause.SUMMARIZED: (
        "messages were replaced by a summary",
        "Summarise seldom and much at once; what follows the summary can be recovered.",
    ),
    Cause.TRUNCATED: (
        "a piece of an earlier message was cut out",
        "Shorten it before it first enters the context, or cut many messages at once and seldom.",
    ),
    Cause.REDACTED: (
        "text was redacted",
        "Nothing, this was wanted. Mark the edit `forget` where no state that saw the text may "
        "survive.",
    ),
    Cause.DELETED: (
        "an earlier message was deleted",
        "Delete many at once and seldom, or leave it and say in a new message that it no longer "
        "counts.",
    ),
    Cause.INSERTED: (
        "something was inserted before the end",
        "Append it as the newest message instead, where its place does not matter.",
    ),
    Cause.CHANGED: (
        "an earlier message was changed",
        "Append the correction as a new message instead; otherwise let recovery keep what follows.",
    ),
}
