"""Compares one message with another: how alike they are, and what kind of change lies between."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from typing import Any

from patchkv_agents.context.edits import EditKind
from patchkv_agents.context.messages import Message

# A text this short can be a part of another one by chance.
_SHORTEST_REMNANT = 16
_INLINE_REASONING = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


def similarity(a: Message, b: Message) -> float:
    """Share of text which two messages have in common, from 0 to 1; 0 if their roles differ.

    The larger of two shares: common beginning and end, and common words in any order.
    """
    if a.role != b.role:
        return 0.0
    return text_similarity(_full_text(a), _full_text(b))


def text_similarity(a: str, b: str) -> float:
    """Share of text which two texts have in common, from 0 to 1. Linear in their length."""
    if a == b:
        return 1.0
    prefix, suffix = common_ends(a, b)
    ends = (prefix + suffix) / max(len(a), len(b))
    words_a, words_b = Counter(a.split()), Counter(b.split())
    total = words_a.total() + words_b.total()
    words = 2 * (words_a & words_b).total() / total if total else 0.0
    return max(ends, words)


def common_prefix(a: str, b: str) -> int:
    """Length of the common beginning."""
    return _longest(min(len(a), len(b)), lambda n: a[:n] == b[:n])


def common_suffix(a: str, b: str) -> int:
    """Length of the common end."""
    return _longest(min(len(a), len(b)), lambda n: a[len(a) - n :] == b[len(b) - n :])


def common_ends(a: str, b: str) -> tuple[int, int]:
    """Length of the common beginning, and of the common end of what is left."""
    prefix = common_prefix(a, b)
    return prefix, common_suffix(a[prefix:], b[prefix:])


def _longest(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest n in [0, limit] for which `holds`, which holds for every smaller n too."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def change_in_place(old: Message, new: Message) -> tuple[EditKind, bool]:
    """Kind of the change of a message into another of the same role; whether it is partial."""
    if old.role in ("system", "developer"):
        return EditKind.REWRITE_SYSTEM, similarity(old, new) >= 0.5
    if _only_reasoning_gone(old, new):
        return EditKind.DROP_REASONING, True
    if _values(old) == _values(new):
        return EditKind.RESERIALIZE, False
    if _all_cut(old, new):
        return EditKind.DELETE, True
    if old.role in ("tool", "function"):
        return EditKind.REPLACE_TOOL_RESULT, similarity(old, new) >= 0.5
    if _all_cut(new, old):
        return EditKind.INSERT, True
    return EditKind.OTHER, similarity(old, new) >= 0.5


def _only_reasoning_gone(old: Message, new: Message) -> bool:
    old_reasoning, old_rest = _split_reasoning(old)
    new_reasoning, new_rest = _split_reasoning(new)
    return bool(old_reasoning) and not new_reasoning and old_rest == new_rest


def _split_reasoning(message: Message) -> tuple[str, list[Any]]:
    """The reasoning, in its field or at the head of the content, and the values of the rest."""
    values = _values(message, reasoning=False)
    if message.reasoning or message.role != "assistant":
        return message.reasoning or "", values
    inline = _INLINE_REASONING.match(message.text)
    if inline is None or not isinstance(message.content, str):
        return "", values
    values[1] = _text_values(message.content[inline.end() :])
    return inline.group(), values


def _values(message: Message, *, reasoning: bool = True) -> list[Any]:
    """What the message says, without the bytes it is written in."""
    if isinstance(message.content, tuple):
        parts = [part.load() for part in message.content]
        content = [
            value
            for part in parts
            for value in (
                _text_values(part["text"]) if part.get("type") == "text" else [_canonical(part)]
            )
        ]
    else:
        content = _text_values(message.content or "")
    calls = [
        (call.name, _json_value(call.arguments_json) or call.arguments_json)
        for call in message.tool_calls
    ]
    thoughts = _text_values(message.reasoning or "") if reasoning else []
    return [message.name, content, calls, thoughts, message.extra.text]


def _text_values(text: str) -> list[str]:
    """The text by value: JSON as what it says, other text without white space and Unicode forms."""
    value = _json_value(text) if text.lstrip()[:1] in ("{", "[") else None
    if value is not None:
        return [value]
    plain = " ".join(unicodedata.normalize("NFC", text).split())
    return [plain] if plain else []


def _json_value(text: str) -> str | None:
    """JSON by value, as a text in which neither key order nor spacing counts; None if not JSON."""
    try:
        return _canonical(json.loads(text, parse_float=_number))
    except (ValueError, RecursionError):
        return None


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _number(digits: str) -> float | int:
    """1.0 and 1 are the same JSON number; other writers print it in another way."""
    number = float(digits)
    return int(number) if number.is_integer() else number


def _all_cut(longer: Message, shorter: Message) -> bool:
    """Whether each text of `shorter` is that of `longer`, or lacks one piece of it."""
    if len(longer.tool_calls) != len(shorter.tool_calls):
        return False
    texts = [(longer.text, shorter.text), (longer.reasoning or "", shorter.reasoning or "")]
    for before, after in zip(longer.tool_calls, shorter.tool_calls, strict=True):
        if before.name != after.name:
            return False
        texts.append((before.arguments_json, after.arguments_json))
    changed = [(before, after) for before, after in texts if before != after]
    return bool(changed) and all(_is_cut(before, after) for before, after in changed)


def _is_cut(longer: str, shorter: str) -> bool:
    if not _SHORTEST_REMNANT <= len(shorter) < len(longer):
        return False
    return sum(common_ends(longer, shorter)) >= len(shorter)


def _full_text(message: Message) -> str:
    calls = (f"{call.name} {call.arguments_json}" for call in message.tool_calls)
    return "\n".join((message.text, *calls))
