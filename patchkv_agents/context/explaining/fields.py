"""Compares two forms of a message field by field, as texts."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass

from patchkv_agents.context.changes.values import json_value
from patchkv_agents.context.messages import Message
from patchkv_agents.context.texts import common_ends

LONGEST_PLACEHOLDER = 200
"""Maximum length, in characters, of a placeholder for text that was cleared."""


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field of a message: its text before and after."""

    field: str
    old: str
    new: str


def changed_fields(old: Message, new: Message) -> list[FieldChange]:
    """The fields in which two forms of a message differ, in the order in which they are shown."""
    before, after = _fields(old), _fields(new)
    return [
        FieldChange(field, before.get(field, ""), after.get(field, ""))
        for field in {**before, **after}
        if before.get(field, "") != after.get(field, "")
    ]


def _fields(message: Message) -> dict[str, str]:
    content = message.content
    if isinstance(content, tuple):
        parts = (part.load() for part in content)
        content = "\n".join(
            str(part["text"]) if part.get("type") == "text" else json.dumps(part) for part in parts
        )
    fields = {"reasoning": message.reasoning or "", "content": content or ""}
    for number, call in enumerate(message.tool_calls):
        fields[f"tool_calls[{number}].name"] = call.name
        fields[f"tool_calls[{number}].arguments"] = call.arguments_json
    return {**fields, "name": message.name or "", "extra": message.extra.text}


def other_form(old: str, new: str) -> str | None:
    """How two equivalent texts differ in form; None if they are not equivalent."""
    values = json_value(old), json_value(new)
    if values[0] is not None and values[0] == values[1]:
        order = [json.dumps(value) for value in values]
        return "other spacing or notation" if order[0] == order[1] else "keys in another order"
    if old.split() == new.split():
        return "other white space"
    composed = [unicodedata.normalize("NFC", text).split() for text in (old, new)]
    return "another Unicode form" if composed[0] == composed[1] else None


def is_trimmed(change: FieldChange) -> bool:
    """Whether a part was removed, with a replacement that is short relative to the rest."""
    common = sum(common_ends(change.old, change.new))
    removed, added = len(change.old) - common, len(change.new) - common
    return added <= min(common, LONGEST_PLACEHOLDER) and 4 * added < removed
