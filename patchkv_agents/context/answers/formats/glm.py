"""Calls of GLM: as keys and values in markers (4.5 and later), or as a name and JSON (4)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from patchkv_agents.context.answers.arguments import Tools, typed_value
from patchkv_agents.context.answers.formats.base import (
    BlockFormat,
    MalformedCall,
    NotACall,
    held_back,
    load_json,
    make_call,
)
from patchkv_agents.context.messages import ToolCall

_PAIR = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL
)
_TURN = "<|assistant|>"


@dataclass(frozen=True, slots=True)
class GlmFormat(BlockFormat):
    """`<tool_call>name`, then pairs of `<arg_key>` and `<arg_value>`, `</tool_call>`.

    Values are text for arguments whose schema says text, JSON for others.
    """

    name: str = "glm"
    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    inner: tuple[str, ...] = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    lead: str = "\n"

    def read(self, block: str, tools: Tools) -> list[ToolCall]:
        """As `CallFormat.read`."""
        text = self.inside(block)
        head = text.find("<arg_key>")
        name = (text if head < 0 else text[:head]).strip()
        if not name or "\n" in name or "<" in name:
            raise MalformedCall("the call has no name in its first line")
        place = len(text) if head < 0 else head
        arguments: dict[str, Any] = {}
        while place < len(text):
            pair = _PAIR.match(text, place)
            if pair is None:
                raise MalformedCall(f"the arguments of {name} are not pairs of a key and a value")
            key, value = pair[1].strip(), pair[2]
            arguments[key] = typed_value(value, tools.get(name, {}).get(key, frozenset()))
            place = pair.end()
        return [make_call(name, arguments)]

    def opening(self, tools: Iterable[str]) -> str:
        """As `CallFormat.opening`."""
        names = list(tools)
        return f"{self.begin}{names[0]}\n" if len(names) == 1 else self.begin


@dataclass(frozen=True, slots=True)
class Glm4Format:
    """The name of a known tool in a line of its own, then its arguments as a JSON object.

    It is the whole turn; `<|assistant|>` begins a further call.
    """

    name: str = "glm4"
    markers: tuple[str, ...] = (_TURN, "<think>", "</think>")
    thinking: tuple[str, str] = ("<think>", "</think>")
    lead: str = "\n"
    id_form: str = "call_{:.24}"

    def find(
        self, text: str, tools: Tools, *, is_start: bool, is_end: bool
    ) -> tuple[int, int | None]:
        """As `CallFormat.find`."""
        start = 0 if is_start else text.find(_TURN)
        while start >= 0:
            verdict = _begins_call(text[start:].removeprefix(_TURN), tools)
            if verdict or (verdict is None and not is_end):
                stop = text.find(_TURN, start + len(_TURN))
                if stop < 0:
                    return start, len(text) if is_end else None
                return start, stop
            start = text.find(_TURN, start + 1)
        return len(text) - (0 if is_end else held_back(text, _TURN)), None

    def read(self, block: str, tools: Tools) -> list[ToolCall]:
        """As `CallFormat.read`."""
        name, _, body = block.removeprefix(_TURN).lstrip().partition("\n")
        if name.strip() not in tools:
            raise NotACall
        return [make_call(name.strip(), load_json(body))]

    def opening(self, tools: Iterable[str]) -> str | None:
        """As `CallFormat.opening`."""
        names = list(tools)
        return f"{names[0]}\n{{" if len(names) == 1 else None


def _begins_call(text: str, tools: Tools) -> bool | None:
    """Whether a turn begins with a tool's name and `{`; None if that cannot be said yet."""
    line, newline, body = text.lstrip().partition("\n")
    if not newline:
        return None if any(f"{name}\n".startswith(line.rstrip(" ")) for name in tools) else False
    if line.strip() not in tools:
        return False
    return body.lstrip().startswith("{") if body.strip() else None
