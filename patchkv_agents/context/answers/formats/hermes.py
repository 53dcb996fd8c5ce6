"""Calls as JSON between two markers: Hermes, Qwen, Nemotron, Phi-4, Cohere and others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from patchkv_agents.context.answers.arguments import Tools
from patchkv_agents.context.answers.formats.base import (
    BlockFormat,
    MalformedCall,
    call_of,
    next_json,
)
from patchkv_agents.context.answers.formats.functions import read_functions
from patchkv_agents.context.messages import ToolCall


@dataclass(frozen=True, slots=True)
class JsonFormat(BlockFormat):
    """One object, or a list of objects, with `name` and `arguments`; any number of blocks.

    Attributes:
        is_list: whether the model's template writes a list.
        keys: of the name and of the arguments, as the model's template writes them.
    """

    name: str = "hermes"
    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    is_list: bool = False
    keys: tuple[str, str] = ("name", "arguments")

    def read(self, block: str, tools: Tools) -> list[ToolCall]:
        """As `CallFormat.read`. Models that were trained on both forms may write functions."""
        text = self.inside(block)
        if text.startswith("<function="):
            return read_functions(text, tools)
        calls: list[ToolCall] = []
        place = 0
        while place < len(text):  # MiniMax M1 writes one object a line
            value, place = next_json(text, place)
            calls += [call_of(item) for item in (value if isinstance(value, list) else [value])]
            place += len(text[place:]) - len(text[place:].lstrip())
        if not calls:
            raise MalformedCall("there is no JSON object between the markers")
        return calls

    def opening(self, tools: Iterable[str]) -> str:
        """As `CallFormat.opening`."""
        names = list(tools)
        first, second = self.keys
        head = f'{self.begin}{"[" if self.is_list else chr(10)}{{"{first}": '
        return f'{head}{json.dumps(names[0])}, "{second}":' if len(names) == 1 else f'{head}"'


@dataclass(frozen=True, slots=True)
class GraniteFormat(JsonFormat):
    """A list of objects behind a marker, to the end of the answer: Granite 3, Phi-4-mini."""

    name: str = "granite"
    begin: str = "<|tool_call|>"
    end: str = "<|/tool_call|>"
    is_list: bool = True

    def find(
        self, text: str, tools: Tools, *, is_start: bool, is_end: bool
    ) -> tuple[int, int | None]:
        """As `CallFormat.find`. Granite has no end marker: its list ends the block."""
        start, stop = BlockFormat.find(self, text, tools, is_start=is_start, is_end=is_end)
        if stop == len(text) and is_end and not text.endswith(self.end):
            try:
                _, end = next_json(text, start + len(self.begin))
            except MalformedCall:
                return start, stop
            return start, end
        return start, stop
