"""Calls as functions and parameters in tags: Qwen3-Coder, Qwen3.5, Nemotron 3, Seed-OSS."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from patchkv_agents.context.answers.arguments import Tools, typed_value
from patchkv_agents.context.answers.formats.base import (
    BlockFormat,
    MalformedCall,
    held_back,
    make_call,
)
from patchkv_agents.context.messages import ToolCall

_HEAD = re.compile(r"<function=([^<>\n]+)>")
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\n]+)>(.*?)(?:</parameter>|(?=<parameter=))"
    r"(?=\s*(?:<parameter=|</function>|\Z))",
    re.DOTALL,
)
_CLOSE = "</function>"


@dataclass(frozen=True, slots=True)
class FunctionFormat(BlockFormat):
    """`<function=NAME>` with `<parameter=KEY>` tags inside; values without quotes or escapes.

    The model may leave the outer markers out: a `<function=` of an offered tool begins a call too.
    """

    name: str = "qwen3_coder"
    begin: str = "<tool_call>"
    end: str = "</tool_call>"

    def find(
        self, text: str, tools: Tools, *, is_start: bool, is_end: bool
    ) -> tuple[int, int | None]:
        """As `CallFormat.find`."""
        start, stop = BlockFormat.find(self, text, tools, is_start=is_start, is_end=is_end)
        bare = _bare_start(text, tools, is_end=is_end)
        if bare >= start:
            return start, stop
        if not _HEAD.match(text, bare):  # the name is not whole yet
            return bare, None
        stop = text.find(_CLOSE, bare)
        if stop < 0:
            return bare, len(text) if is_end else None
        return bare, stop + len(_CLOSE)

    def read(self, block: str, tools: Tools) -> list[ToolCall]:
        """As `CallFormat.read`."""
        return read_functions(self.inside(block), tools)

    def opening(self, tools: Iterable[str]) -> str:
        """As `CallFormat.opening`."""
        names = list(tools)
        head = f"{self.begin}\n<function="
        return f"{head}{names[0]}>\n" if len(names) == 1 else head


def read_functions(text: str, tools: Tools) -> list[ToolCall]:
    """The calls of a text that holds functions and white space.

    Raises:
        MalformedCall: it holds something else.
    """
    calls: list[ToolCall] = []
    place = 0
    while place < len(text):
        head = _HEAD.match(text, place)
        if head is None:
            raise MalformedCall("a call is <function=NAME> with parameters, and </function>")
        name = head[1].strip()
        place = head.end()
        arguments: dict[str, Any] = {}
        while parameter := _PARAMETER.match(text, place):
            key = parameter[1].strip()
            value = parameter[2].removeprefix("\n").removesuffix("\n")
            arguments[key] = typed_value(value, tools.get(name, {}).get(key, frozenset()))
            place = parameter.end()
        rest = text[place:].lstrip()
        if rest and not rest.startswith(_CLOSE):
            raise MalformedCall(f"the arguments of {name} are not parameters in tags")
        text, place = rest.removeprefix(_CLOSE).lstrip(), 0
        calls.append(make_call(name, arguments))
    if not calls:
        raise MalformedCall("the call has no name")
    return calls


def _bare_start(text: str, tools: Tools, *, is_end: bool) -> int:
    """Where a function of an offered tool begins, or may begin once there is more text."""
    heads = [f"<function={name}>" for name in tools]
    places = [place for head in heads if (place := text.find(head)) >= 0]
    if not is_end:
        places += [len(text) - held_back(text, head) for head in heads]
    return min(places, default=len(text))
