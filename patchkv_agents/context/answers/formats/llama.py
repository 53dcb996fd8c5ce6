"""Calls of Llama 3: the whole answer is JSON, or JSON follows `<|python_tag|>`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from patchkv_agents.context.answers.formats.base import (
    MalformedCall,
    NotACall,
    Tools,
    call_of,
    find_enclosed,
    next_json,
)
from patchkv_agents.context.messages import ToolCall

_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class LlamaFormat:
    """Objects with `name` and `parameters`, one after the other, with `;` or nothing between."""

    name: str = "llama3"
    markers: tuple[str, ...] = (_TAG, "<think>", "</think>")
    thinking: tuple[str, str] = ("<think>", "</think>")
    lead: str = ""
    id_form: str = "call_{:.24}"

    def find(
        self, text: str, tools: Tools, *, is_start: bool, is_end: bool
    ) -> tuple[int, int | None]:
        """As `CallFormat.find`."""
        if is_start:
            place = len(text) - len(text.lstrip())
            if text.startswith("{", place):
                return place, len(text) if is_end else None
            if place == len(text) and not is_end:
                return 0, None
        return next(iter(find_enclosed(text, _TAG, None, is_end=is_end)))

    def read(self, block: str, tools: Tools) -> list[ToolCall]:
        """As `CallFormat.read`. Without the tag, JSON that is not a call is text."""
        is_tagged = block.startswith(_TAG)
        text = block.removeprefix(_TAG).strip()
        calls: list[ToolCall] = []
        place = 0
        try:
            while place < len(text):
                value, place = next_json(text, place)
                if not is_tagged and not (
                    isinstance(value, dict) and {"parameters", "arguments"} & value.keys()
                ):
                    raise NotACall
                calls.append(call_of(value))
                place += len(text[place:]) - len(text[place:].lstrip("; \r\n\t"))
        except MalformedCall:
            if is_tagged:
                raise
            raise NotACall from None
        if not calls:
            raise MalformedCall("nothing follows the tag")
        return calls

    def opening(self, tools: Iterable[str]) -> str:
        """As `CallFormat.opening`."""
        names = list(tools)
        if len(names) != 1:
            return '{"name": "'
        return f'{{"name": {json.dumps(names[0])}, "parameters":'
