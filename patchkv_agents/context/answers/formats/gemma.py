"""Calls of Gemma 4: `call:NAME{...}` between markers, in a notation of its own for values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from patchkv_agents.context.answers.arguments import Tools
from patchkv_agents.context.answers.formats.base import BlockFormat, MalformedCall, make_call
from patchkv_agents.context.messages import ToolCall

_QUOTE = '<|"|>'
_HEAD = re.compile(r"call:\s*([^\s{]+)\s*(?=\{)")
_KEY = re.compile(r"([^\s:{}\[\],]+)\s*:")
_SCALAR = re.compile(r"[^,\]}]*")


@dataclass(frozen=True, slots=True)
class GemmaFormat(BlockFormat):
    """Keys without quotes, texts between markers of their own, the rest as in JSON."""

    name: str = "gemma4"
    begin: str = "<|tool_call>"
    end: str = "<tool_call|>"
    inner: tuple[str, ...] = (_QUOTE, "<|channel>")
    thinking: tuple[str, str] = ("<|channel>thought\n", "<channel|>")

    def read(self, block: str, tools: Tools) -> list[ToolCall]:
        """As `CallFormat.read`."""
        text = self.inside(block)
        head = _HEAD.match(text)
        if head is None:
            raise MalformedCall("a call is call:NAME{...}")
        arguments, end = _value(text, head.end(), 0)
        if text[end:].strip():
            raise MalformedCall(f"something follows the arguments of {head[1]}")
        return [make_call(head[1], arguments)]

    def opening(self, tools: Iterable[str]) -> str:
        """As `CallFormat.opening`."""
        names = list(tools)
        head = f"{self.begin}call:"
        return f"{head}{names[0]}{{" if len(names) == 1 else head


def _value(text: str, place: int, depth: int) -> tuple[Any, int]:
    """The value that begins at a place, and its end."""
    if depth > 64:
        raise MalformedCall("its values are nested too deeply")
    place = _past_space(text, place)
    if text.startswith(_QUOTE, place):
        return _quoted(text, place)
    if text[place : place + 1] == '"':
        try:
            return json.JSONDecoder(strict=False).raw_decode(text, place)
        except ValueError as error:
            raise MalformedCall(f"a text in it is not closed: {error}") from None
    if text[place : place + 1] == "{":
        return _items(text, place + 1, depth, "}")
    if text[place : place + 1] == "[":
        return _items(text, place + 1, depth, "]")
    scalar = _SCALAR.match(text, place)
    assert scalar is not None  # it may be empty
    word = scalar[0].strip()
    try:
        return json.loads(word.replace("None", "null")), scalar.end()
    except ValueError:
        if not word:
            raise MalformedCall("a value is missing") from None
        return word, scalar.end()


def _items(text: str, place: int, depth: int, close: str) -> tuple[Any, int]:
    """The rest of an object or of a list, behind its bracket."""
    mapping: dict[str, Any] = {}
    sequence: list[Any] = []
    place = _past_space(text, place)
    while not text.startswith(close, place):
        if close == "}":
            key, place = _key(text, place)
            mapping[key], place = _value(text, place, depth + 1)
        else:
            value, place = _value(text, place, depth + 1)
            sequence.append(value)
        place = _past_space(text, place)
        if text.startswith(",", place):
            place = _past_space(text, place + 1)
        elif not text.startswith(close, place):
            raise MalformedCall(f"it is not closed with {close}")
    return (mapping if close == "}" else sequence), place + 1


def _key(text: str, place: int) -> tuple[str, int]:
    """The key that begins at a place, and the place behind its colon."""
    if text.startswith(_QUOTE, place) or text.startswith('"', place):
        key, end = _value(text, place, 0)
        if not text.startswith(":", end):
            raise MalformedCall("a key has no value")
        return str(key), end + 1
    match = _KEY.match(text, place)
    if match is None:
        raise MalformedCall("the arguments are not keys and values")
    return match[1], match.end()


def _quoted(text: str, place: int) -> tuple[str, int]:
    """The text between two quotes, and its end."""
    start = place + len(_QUOTE)
    stop = text.find(_QUOTE, start)
    if stop < 0:
        raise MalformedCall("a text in it is not closed")
    return text[start:stop], stop + len(_QUOTE)


def _past_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place
