"""Calls as invocations with named parameters in tags: MiniMax M2, DeepSeek V3.2."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from patchkv_agents.context.answers.arguments import Tools, Types, typed_value
from patchkv_agents.context.answers.formats.base import (
    BlockFormat,
    MalformedCall,
    load_json,
    make_call,
)
from patchkv_agents.context.messages import ToolCall

DSML = "\uff5cDSML\uff5c"
"""What DeepSeek puts in front of the names of its tags."""


@dataclass(frozen=True, slots=True)
class InvokeFormat(BlockFormat):
    """`<invoke name="NAME">` with `<parameter name="KEY">` tags inside.

    Attributes:
        tag: is in front of the names of the inner tags.
    """

    name: str = "minimax"
    begin: str = "<minimax:tool_call>"
    end: str = "</minimax:tool_call>"
    tag: str = ""

    def read(self, block: str, tools: Tools) -> list[ToolCall]:
        """As `CallFormat.read`."""
        tag = re.escape(self.tag)
        head = re.compile(rf'\s*<{tag}invoke name="([^"<>]+)">')
        parameter = re.compile(
            rf'\s*<{tag}parameter name="([^"<>]+)"(?: string="(true|false)")?>(.*?)'
            rf"</{tag}parameter>(?=\s*(?:<{tag}parameter |</{tag}invoke>|\Z))",
            re.DOTALL,
        )
        close = re.compile(rf"\s*(?:</{tag}invoke>\s*|\Z)")
        text = self.inside(block)
        calls: list[ToolCall] = []
        place = 0
        while place < len(text):
            found = head.match(text, place)
            if found is None:
                raise MalformedCall("a call is an invoke tag with a name and parameters")
            name, place = found[1], found.end()
            arguments: dict[str, Any] = {}
            while found := parameter.match(text, place):
                types = tools.get(name, {}).get(found[1], frozenset())
                arguments[found[1]] = _value(found[3], found[2], types)
                place = found.end()
            found = close.match(text, place)
            if found is None:
                raise MalformedCall(f"the arguments of {name} are not parameters in tags")
            place = found.end()
            calls.append(make_call(name, arguments))
        if not calls:
            raise MalformedCall("the call has no name")
        return calls

    def opening(self, tools: Iterable[str]) -> str:
        """As `CallFormat.opening`."""
        names = list(tools)
        head = f'{self.begin}\n<{self.tag}invoke name="'
        return f'{head}{names[0]}">\n' if len(names) == 1 else head


def _value(text: str, is_string: str | None, types: Types) -> Any:
    """The value of a parameter; DeepSeek says whether it is text."""
    if is_string == "true":
        return text
    return load_json(text) if is_string == "false" else typed_value(text, types)
