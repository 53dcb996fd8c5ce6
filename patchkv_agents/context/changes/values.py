"""Whether two messages say the same, whatever the bytes in which they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from patchkv_agents.context.frozen import FrozenJson
from patchkv_agents.context.messages import Message, ToolCall
from patchkv_agents.context.texts import same_words

_INLINE_REASONING = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
_REASONING_PARTS = ("thinking", "redacted_thinking", "reasoning")

Content = str | tuple[FrozenJson, ...] | None


def same_values(old: Message, new: Message) -> bool:
    """Whether all values are the same.

    JSON counts without key order and spacing, other text without white space and Unicode form;
    text counts as much as the same text in parts.
    """
    if not same_text(old.reasoning or "", new.reasoning or ""):
        return False
    return _same_rest(old, new, old.content)


def only_reasoning_gone(old: Message, new: Message) -> bool:
    """Whether `new` is `old` without its reasoning, in whatever form the message had it."""
    content = old.content
    if isinstance(content, tuple):
        content = tuple(part for part in content if part.load().get("type") not in _REASONING_PARTS)
    elif content and old.role == "assistant" and (inline := _INLINE_REASONING.match(content)):
        content = content[inline.end() :]
    had = old.reasoning or content != old.content
    return bool(had) and not new.reasoning and _same_rest(old, new, content)


def same_text(a: str, b: str) -> bool:
    """Whether two texts have the same value: as JSON if one of them is JSON, else in words."""
    if a == b:
        return True
    old, new = json_value(a), json_value(b)
    if old is None and new is None:
        return same_words(a, b)
    return old is not None and new is not None and _same_json(old, new)


def same_arguments(old: ToolCall, new: ToolCall) -> bool:
    """Whether two calls give the same function the same arguments."""
    if old.name != new.name:
        return False
    return old.arguments_json == new.arguments_json or _same_json(
        old.parsed_arguments(), new.parsed_arguments()
    )


def _same_rest(old: Message, new: Message, old_content: Content) -> bool:
    """Whether two messages agree in all but reasoning, the old one with other content."""
    if (old.name, old.extra) != (new.name, new.extra):
        return False
    if len(old.tool_calls) != len(new.tool_calls):
        return False
    if not all(map(same_arguments, old.tool_calls, new.tool_calls)):
        return False
    before, after = content_pieces(old_content), content_pieces(new.content)
    return len(before) == len(after) and all(map(_same_piece, before, after))


def content_pieces(content: Content) -> Sequence[str | FrozenJson]:
    """The content's parts: texts that are not blank, and whatever else there is."""
    if not isinstance(content, tuple):
        return [content] if content and content.strip() else []
    pieces: list[str | FrozenJson] = []
    for part in content:
        value = part.load()
        text = value["text"] if value.get("type") == "text" else None
        if text is None or text.strip():
            pieces.append(part if text is None else text)
    return pieces


def _same_piece(old: str | FrozenJson, new: str | FrozenJson) -> bool:
    if isinstance(old, str) or isinstance(new, str):
        return isinstance(old, str) and isinstance(new, str) and same_text(old, new)
    return old.canonical == new.canonical


def json_value(text: str) -> Any | None:
    """The value of a text that is a JSON object or list; None for any other text."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _same_json(old: Any, new: Any) -> bool:
    try:
        return bool(old == new) and _same_booleans(old, new)
    except RecursionError:
        return False


def _same_booleans(old: Any, new: Any) -> bool:
    """Whether equal values agree in type where Python does not tell them apart: 1 and true.

    1 and 1.0 are the same JSON number, which other writers print in another way.
    """
    if isinstance(old, dict):
        return all(_same_booleans(value, new[key]) for key, value in old.items())
    if isinstance(old, list):
        return all(map(_same_booleans, old, new))
    return isinstance(old, bool) == isinstance(new, bool)
