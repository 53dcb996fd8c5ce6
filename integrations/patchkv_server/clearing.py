"""Edits that the server makes for a client, which sends the whole history again each time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from patchkv_agents.context import Message, ToolCall
from patchkv_server.errors import invalid
from patchkv_server.messages_requests import ContextEdit

CLEARED = "[Old tool result content cleared]"
DEFAULT_TRIGGER_TOKENS = 100_000
DEFAULT_KEPT_USES = 3
MAX_CLEARED = 10_000
"""Calls of a conversation that are remembered as cleared."""
MAX_CONVERSATIONS = 1_000
_TOOL_USES, _THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"

_Key = tuple[str, str]
CountTokens = Callable[[Sequence[Message]], int]


@dataclass(frozen=True, slots=True)
class Cleared:
    """A context after its edits.

    Attributes:
        messages: of it.
        applied: the edits, as the API tells them.
    """

    messages: tuple[Message, ...]
    applied: tuple[dict[str, Any], ...]


class ToolClearing:
    """Remembers which calls' results were cleared, so that each is cleared once and stays so.

    Of each conversation by itself, which its tenant and first question name: programs number their
    calls anew in each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: OrderedDict[_Key, OrderedDict[str, None]] = OrderedDict()

    def apply(
        self,
        tenant: str,
        messages: tuple[Message, ...],
        edits: Sequence[ContextEdit],
        count: CountTokens,
        *,
        remember: bool = True,
    ) -> Cleared:
        """Make the edits.

        Args:
            tenant: whose context it is.
            messages: as the client sent them.
            edits: to be made.
            count: tokens of a context.
            remember: later requests leave out what is left out now.

        Raises:
            ApiError: 400, an edit is not known.
        """
        applied = []
        first = next((m.content_hash for m in messages if m.role == "user"), "")
        for index, edit in enumerate(edits):
            if edit.type == _TOOL_USES:
                messages, record, ids = self._clear_tool_uses(
                    (tenant, first), messages, edit, count
                )
                if remember:
                    self._remember((tenant, first), ids)
            elif edit.type == _THINKING:
                messages, record = _clear_thinking(messages, edit, count)
            else:
                raise invalid(
                    f"an edit of type {edit.type!r} is not known: there are {_TOOL_USES} and "
                    f"{_THINKING}",
                    f"context_management.edits[{index}].type",
                )
            if record is not None:
                applied.append({"type": edit.type, **record})
        return Cleared(messages, tuple(applied))

    def _clear_tool_uses(
        self, key: _Key, messages: tuple[Message, ...], edit: ContextEdit, count: CountTokens
    ) -> tuple[tuple[Message, ...], dict[str, int] | None, set[str | None]]:
        """The messages, what was done, and the calls that were cleared anew."""
        calls = [
            call
            for message in messages
            for call in message.tool_calls
            if call.id is not None and call.name not in (edit.exclude_tools or ())
        ]
        with self._lock:
            known = self._ids.get(key, OrderedDict())
            before = {call.id for call in calls if call.id in known}
        current = _without(messages, before, edit)
        keep = edit.keep.value if edit.keep and not isinstance(edit.keep, str) else None
        left = [call for call in calls if call.id not in before]
        old = left[: max(0, len(left) - (DEFAULT_KEPT_USES if keep is None else keep))]
        tokens: int | None = None
        new: set[str | None] = set()
        if old and self._is_triggered(edit, len(left), lambda: count(current)):
            tokens = count(current)
            fewer = _without(messages, before | {call.id for call in old}, edit)
            freed = tokens - count(fewer)
            if edit.clear_at_least is None or freed >= edit.clear_at_least.value:
                new, current = {call.id for call in old}, fewer
        if not before and not new:
            return messages, None, new
        saved = count(messages) - count(current)
        uses = len({call.id for call in calls} & (before | new))
        record = {"cleared_tool_uses": uses, "cleared_input_tokens": max(0, saved)}
        return current, record, new

    def _is_triggered(self, edit: ContextEdit, uses: int, tokens: Callable[[], int]) -> bool:
        if edit.trigger is not None and edit.trigger.type == "tool_uses":
            return uses > edit.trigger.value
        limit = DEFAULT_TRIGGER_TOKENS if edit.trigger is None else edit.trigger.value
        return tokens() > limit

    def _remember(self, key: _Key, ids: set[str | None]) -> None:
        if not ids and key not in self._ids:
            return
        with self._lock:
            known = self._ids.setdefault(key, OrderedDict())
            self._ids.move_to_end(key)
            known.update(dict.fromkeys(call_id for call_id in ids if call_id is not None))
            while len(known) > MAX_CLEARED:
                known.popitem(last=False)
            while len(self._ids) > MAX_CONVERSATIONS:
                self._ids.popitem(last=False)


def _without(
    messages: Sequence[Message], ids: set[str | None], edit: ContextEdit
) -> tuple[Message, ...]:
    """The messages with these calls' results cleared, and their arguments if that is asked for."""
    inputs = edit.clear_tool_inputs

    def call(made: ToolCall) -> ToolCall:
        is_cleared = inputs is True or (isinstance(inputs, list) and made.name in inputs)
        if made.id in ids and is_cleared:
            return ToolCall(made.name, "{}", id=made.id)
        return made

    return tuple(
        message.with_content(CLEARED)
        if message.role == "tool" and message.tool_call_id in ids
        else replace(message, tool_calls=tuple(map(call, message.tool_calls)))
        if inputs and message.tool_calls
        else message
        for message in messages
    )


def _clear_thinking(
    messages: tuple[Message, ...], edit: ContextEdit, count: CountTokens
) -> tuple[tuple[Message, ...], dict[str, int] | None]:
    if edit.keep == "all":
        return messages, None
    keep = edit.keep.value if edit.keep and not isinstance(edit.keep, str) else 1
    thinking = [index for index, message in enumerate(messages) if message.reasoning]
    old = set(thinking[: max(0, len(thinking) - keep)])
    if not old:
        return messages, None
    fewer = tuple(
        replace(message, reasoning=None) if index in old else message
        for index, message in enumerate(messages)
    )
    saved = max(0, count(messages) - count(fewer))
    return fewer, {"cleared_thinking_turns": len(old), "cleared_input_tokens": saved}
