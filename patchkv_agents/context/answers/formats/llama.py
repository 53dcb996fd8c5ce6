"""Calls of Llama 3: the whole answer is JSON or Python, or that follows `<|python_tag|>`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from patchkv_agents.context.answers.arguments import Tools
from patchkv_agents.context.answers.formats.base import (
    MalformedCall,
    NotACall,
    call_of,
    find_enclosed,
    next_json,
)
from patchkv_agents.context.answers.formats.pythonic import read_calls
from patchkv_agents.context.messages import ToolCall

_TAG = "<|python_tag|>"


_PYTHON = re.compile(r"\[?\s*[A-Za-z_][\w.]*\s*\(")


@dataclass(frozen=True, slots=True)
class LlamaFormat:
    """Objects with `name` and `parameters`, one after the other, with `;` or nothing between.

    Llama 3.2 and 4 may write `[name(key="value")]` in their place. Without the tag, it is a call
    only where all of the answer is calls of tools that were offered: it may be an answer in JSON.
    """

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
            if text.startswith("{", place) or _may_be_python(text[place:], tools):
                return place, len(text) if is_end else None
            if place == len(text) and not is_end:
                return 0, None
        return next(iter(find_enclosed(text, _TAG, None, is_end=is_end)))

    def read(self, block: str, tools: Tools) -> list[ToolCall]:
        """As `CallFormat.read`."""
        is_tagged = block.startswith(_TAG)
        text = block.removeprefix(_TAG).strip()
        try:
            calls = read_calls(text) if _PYTHON.match(text) else _read_objects(text)
        except MalformedCall:
            if is_tagged:
                raise
            raise NotACall from None
        if not calls:
            raise MalformedCall("nothing follows the tag")
        if not is_tagged and any(call.name not in tools for call in calls):
            raise NotACall
        return calls

    def opening(self, tools: Iterable[str]) -> str:
        """As `CallFormat.opening`."""
        names = list(tools)
        if len(names) != 1:
            return '{"name": "'
        return f'{{"name": {json.dumps(names[0])}, "parameters":'


def _read_objects(text: str) -> list[ToolCall]:
    """The calls of JSON objects in a row; each names its arguments."""
    calls: list[ToolCall] = []
    place = 0
    while place < len(text):
        value, place = next_json(text, place)
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict) or not {"parameters", "arguments"} & item.keys():
                raise MalformedCall("an object in it has no parameters")
            calls.append(call_of(item))
        place += len(text[place:]) - len(text[place:].lstrip("; \r\n\t"))
    return calls


def _may_be_python(text: str, tools: Tools) -> bool:
    """Whether a list of calls of an offered tool begins here, or may once there is more text."""
    if not text.startswith("["):
        return False
    rest = text[1:].lstrip()
    return any(rest.startswith(f"{name}(") or f"{name}(".startswith(rest) for name in tools)
