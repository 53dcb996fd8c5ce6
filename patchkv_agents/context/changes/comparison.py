"""Compares one message with another: how alike they are, and what kind of change lies between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from patchkv_agents.context.changes.values import content_pieces, only_reasoning_gone, same_values
from patchkv_agents.context.edits import EditKind
from patchkv_agents.context.frozen import FrozenJson
from patchkv_agents.context.messages import Message, ToolCall
from patchkv_agents.context.texts import LONGEST_MARKER, common_ends, is_cut, text_similarity

# Of a text that was cut short so many characters are left; of an argument so long maybe none.
_SHORTEST_STUB = 8
_LONG_ARGUMENT = 200


def similarity(a: Message, b: Message) -> float:
    """Share of text which two messages have in common, from 0 to 1; 0 if their roles differ."""
    same = plain_role(a) == plain_role(b)
    return text_similarity(full_text(a), full_text(b)) if same else 0.0


def plain_role(message: Message) -> str:
    """The role, by one of its names where it has two."""
    return {"developer": "system", "function": "tool"}.get(message.role, message.role)


def full_text(message: Message) -> str:
    """Content and calls as one text."""
    calls = (f"{call.name} {call.arguments_json}" for call in message.tool_calls)
    return "\n".join((message.text, *calls))


def change_in_place(old: Message, new: Message) -> tuple[EditKind, bool]:
    """Kind of the change of a message into another of the same role; whether it is partial."""
    if plain_role(old) == "system":
        return EditKind.REWRITE_SYSTEM, similarity(old, new) >= 0.5
    if only_reasoning_gone(old, new):
        return EditKind.DROP_REASONING, True
    if same_values(old, new):
        return EditKind.RESERIALIZE, False
    if plain_role(old) == "tool":
        if _is_cut(old, new):
            return EditKind.DELETE, True
        return EditKind.REPLACE_TOOL_RESULT, similarity(old, new) >= 0.5
    if _is_cut(old, new) or _lacks_parts(old, new) or _is_shortened(old, new):
        return EditKind.DELETE, True
    if _is_cut(new, old) or _lacks_parts(new, old):
        return EditKind.INSERT, True
    return EditKind.OTHER, similarity(old, new) >= 0.5


def _is_cut(longer: Message, shorter: Message) -> bool:
    """Whether each text of `shorter` is that of `longer`, or lacks one piece of it."""
    pairs = _text_pairs(longer, shorter)
    return pairs is not None and all(is_cut(before, after) for before, after in pairs)


def _is_shortened(longer: Message, shorter: Message) -> bool:
    """Whether texts of `longer` were cut, some of them with a marker for what is gone."""
    pairs = _text_pairs(longer, shorter)
    if pairs is None:
        return False
    arguments = {value for call in shorter.tool_calls for value in _leaves(call).values()}
    return all(
        is_cut(before, after) or _has_marker(before, after, is_argument=after in arguments)
        for before, after in pairs
    )


def _has_marker(longer: str, shorter: str, *, is_argument: bool) -> bool:
    if 2 * len(shorter) > len(longer):
        return False
    kept = sum(common_ends(longer, shorter))
    least = 0 if is_argument and len(longer) >= _LONG_ARGUMENT else _SHORTEST_STUB
    return kept >= least and len(shorter) - kept <= LONGEST_MARKER


def _text_pairs(a: Message, b: Message) -> list[tuple[str, str]] | None:
    """The texts in which two messages differ, side by side; None if they differ in other ways.

    Arguments are compared value by value where they have the same names, else as one text.
    """
    if (a.name, a.extra, len(a.tool_calls)) != (b.name, b.extra, len(b.tool_calls)):
        return None
    if _other_parts(a) != _other_parts(b):
        return None
    pairs = [(a.text, b.text), (a.reasoning or "", b.reasoning or "")]
    for old, new in zip(a.tool_calls, b.tool_calls, strict=True):
        if old.name != new.name:
            return None
        before, after = _leaves(old), _leaves(new)
        if before.keys() != after.keys():
            before, after = {"": old.arguments_json}, {"": new.arguments_json}
        pairs += [(before[path], after[path]) for path in before]
    return [(before, after) for before, after in pairs if before != after] or None


def _leaves(call: ToolCall) -> dict[str, str]:
    """The values of a call's arguments as texts, by their path."""

    def walk(path: str, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(f"{path}.{key}", inner)
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                yield from walk(f"{path}[{index}]", inner)
        else:
            yield path, value if isinstance(value, str) else repr(value)

    try:
        return dict(walk("", call.parsed_arguments()))
    except RecursionError:
        return {"": call.arguments_json}


def _lacks_parts(longer: Message, shorter: Message) -> bool:
    """Whether `shorter` has the parts and calls of `longer`, in order, but not all of them.

    For what is no text, a short text may stand.
    """
    if (longer.name, longer.extra) != (shorter.name, shorter.extra):
        return False
    some, everything = _parts(shorter), _parts(longer)
    if len(some) == len(everything):
        pairs = [(a, b) for a, b in zip(everything, some, strict=True) if a != b]
        return bool(pairs) and all(isinstance(a, FrozenJson) and _is_marker(b) for a, b in pairs)
    rest = iter(everything)
    return 0 < len(some) < len(everything) and all(part in rest for part in some)


def _is_marker(part: Any) -> bool:
    return isinstance(part, str) and len(part) <= LONGEST_MARKER


def _other_parts(message: Message) -> list[str]:
    """The parts of the content that are no text."""
    parts = content_pieces(message.content)
    return [part.canonical for part in parts if isinstance(part, FrozenJson)]


def _parts(message: Message) -> Sequence[Any]:
    calls = [(call.name, call.arguments_json) for call in message.tool_calls]
    reasoning = [("reasoning", message.reasoning)] if message.reasoning else []
    return [*reasoning, *content_pieces(message.content), *calls]
