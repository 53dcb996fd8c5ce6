"""Removes text from messages and other values."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from patchkv_agents.context.edits import Edit
from patchkv_agents.context.frozen import FrozenJson, check_text, to_json
from patchkv_agents.context.messages import Message, ToolCall
from patchkv_agents.errors import ContextError

REMOVED = "[removed]"
"""Replacement for removed text."""

# A shorter text is part of too many others.
_SHORTEST_SECRET = 4


def emptied(message: Message) -> Message:
    """The message without content: only role, name, ids and the names of its calls remain."""
    return Message(
        role=message.role,
        content=REMOVED,
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=tuple(
            ToolCall(call.name, "{}", raw=call.raw, id=call.id) for call in message.tool_calls
        ),
        id=message.id,
    )


@dataclass(frozen=True, slots=True)
class Scrubber:
    """Replaces secrets by `REMOVED` wherever they stand; also as JSON escapes them, however often.

    Values without a secret are returned as they are (the same object).
    """

    needles: tuple[str, ...] = ()
    patterns: tuple[re.Pattern[str], ...] = ()

    @classmethod
    def of(cls, secrets: Iterable[str]) -> Scrubber:
        """A scrubber for these texts.

        Raises:
            ContextError: a secret is not a text of 4 characters or more.
        """
        if isinstance(secrets, str):
            raise ContextError("Pass secrets as a list of texts, as in secrets=['...'].")
        needles: set[str] = set()
        for secret in secrets:
            if not isinstance(secret, str) or len(secret.strip()) < _SHORTEST_SECRET:
                raise ContextError(
                    f"A secret must be a text of {_SHORTEST_SECRET} characters or more: shorter "
                    "ones are part of other words. Name the message itself instead."
                )
            check_text(secret, "A secret")
            # Programs also write the same text in the other Unicode form.
            needles |= {secret, *(unicodedata.normalize(form, secret) for form in ("NFC", "NFD"))}
        # Longer ones first: one secret may be a part of another.
        ordered = sorted(needles, key=lambda needle: (-len(needle), needle))
        return cls(tuple(ordered), tuple(map(_pattern, ordered)))

    def text(self, text: str) -> str:
        """`text` without secrets."""
        for needle, pattern in zip(self.needles, self.patterns, strict=True):
            text = text.replace(needle, REMOVED)
            if "\\" in text:
                text = pattern.sub(REMOVED, text)
        return text

    def frozen(self, value: FrozenJson) -> FrozenJson:
        """A JSON value without secrets; a number that contains one becomes a string."""
        if self.text(value.text) == value.text:
            return value
        return FrozenJson(to_json(self._value(value.load())))

    def message(self, message: Message) -> Message:
        """The message without secrets."""
        if not self.needles:
            return message
        content = message.content
        scrubbed = replace(
            message,
            content=tuple(map(self.frozen, content))
            if isinstance(content, tuple)
            else self._optional(content),
            name=self._optional(message.name),
            tool_call_id=self._optional(message.tool_call_id),
            tool_calls=tuple(map(self._call, message.tool_calls)),
            reasoning=self._optional(message.reasoning),
            id=message.id if message.id and self.text(message.id) == message.id else None,
            extra=self.frozen(message.extra),
            metadata=self.frozen(message.metadata),
        )
        return message if scrubbed == message else scrubbed

    def edit(self, edit: Edit) -> Edit:
        """The edit without secrets in its texts."""
        if not self.needles:
            return edit
        return replace(
            edit,
            message_ids=tuple(map(self.text, edit.message_ids)),
            tool_call_ids=tuple(map(self.text, edit.tool_call_ids)),
            author=self._optional(edit.author),
            checkpoint_id=self._optional(edit.checkpoint_id),
            given_key=self._optional(edit.given_key),
            metadata=self.frozen(edit.metadata),
        )

    def _optional(self, text: str | None) -> str | None:
        return text if text is None else self.text(text)

    def _call(self, call: ToolCall) -> ToolCall:
        return replace(
            call,
            name=self.text(call.name),
            arguments_json=self._arguments(call.arguments_json),
            id=self._optional(call.id),
            extra=self.frozen(call.extra),
        )

    def _arguments(self, text: str) -> str:
        """Arguments without secrets; valid JSON stays valid."""
        if self.text(text) == text:
            return text
        try:
            return to_json(self._value(json.loads(text)))
        except (ValueError, RecursionError):
            return self.text(text)

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key): self._value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._value(item) for item in value]
        shown = to_json(value)
        return value if self.text(shown) == shown else REMOVED


# What JSON may write behind a backslash for a character, beside `uXXXX`.
_SHORT = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", '"': '"', "/": "/"}


def _pattern(secret: str) -> re.Pattern[str]:
    """The text in any spelling inside JSON strings, or inside JSON inside JSON strings."""
    return re.compile("".join(map(_spellings, re.findall(r"\\+|[^\\]", secret))))


def _spellings(piece: str) -> str:
    """Spellings of one character, or of backslashes in a row."""
    if piece.startswith("\\"):
        return r"(?:\\(?:u(?i:005c))?)+"
    units = re.findall("....", piece.encode("utf-16-be").hex())
    escaped = "".join(rf"\\+u(?i:{unit})" for unit in units)
    short = rf"|\\+{_SHORT[piece]}" if piece in _SHORT else ""
    return f"(?:{re.escape(piece)}|{escaped}{short})"
