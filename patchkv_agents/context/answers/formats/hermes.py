"""Calls as JSON between `<tool_call>` and `</tool_call>`: Hermes, Qwen, SmolLM and others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from patchkv_agents.context.answers.formats.base import (
    MalformedCall,
    Tools,
    call_of,
    find_enclosed,
    load_json,
)
from patchkv_agents.context.messages import ToolCall

OPENING, CLOSING = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class HermesFormat:
    """One object, or a list of objects, with `name` and `arguments`; any number of blocks."""

    name: str = "hermes"
    markers: tuple[str, ...] = (OPENING, CLOSING, "<think>", "</think>")
    thinking: tuple[str, str] = ("<think>", "</think>")
    lead: str = ""
    id_form: str = "call_{:.24}"

    def find(
        self, text: str, tools: Tools, *, is_start: bool, is_end: bool
    ) -> tuple[int, int | None]:
        """As `CallFormat.find`. A closing marker in an argument does not end the call."""
        return first_readable(self, text, tools, is_end=is_end)

    def read(self, block: str, tools: Tools) -> list[ToolCall]:
        """As `CallFormat.read`."""
        value = load_json(inside(block))
        return [call_of(item) for item in (value if isinstance(value, list) else [value])]

    def opening(self, tools: Iterable[str]) -> str:
        """As `CallFormat.opening`."""
        names = list(tools)
        head = f'{OPENING}\n{{"name": '
        return f'{head}{json.dumps(names[0])}, "arguments":' if len(names) == 1 else f'{head}"'


def inside(block: str) -> str:
    """What is between the markers."""
    return block.removeprefix(OPENING).removesuffix(CLOSING).strip()


def first_readable(
    call_format: HermesFormat, text: str, tools: Tools, *, is_end: bool
) -> tuple[int, int | None]:
    """The first block between markers that can be read; if none can, the shortest one."""
    candidates = list(find_enclosed(text, OPENING, CLOSING, is_end=is_end))
    for start, stop in candidates:
        if stop is None:
            return start, None
        try:
            call_format.read(text[start:stop], tools)
        except MalformedCall:
            continue
        return start, stop
    return candidates[0]
