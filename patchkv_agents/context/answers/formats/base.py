"""The parts that formats of calls share: their interface, blocks between markers, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from patchkv_agents.context.answers.arguments import Tools
from patchkv_agents.context.messages import ToolCall
from patchkv_agents.errors import ContextError


class NotACall(Exception):
    """The block only looked like a call: it is text."""


class MalformedCall(Exception):
    """The block begins as a call does, and cannot be read. Says why."""


class CallFormat(Protocol):
    """How a family of models writes calls of tools."""

    @property
    def name(self) -> str:
        """Of the format."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that enclose calls and reasoning, which are special tokens to some tokenizers."""
        ...

    @property
    def thinking(self) -> tuple[str, str]:
        """Begin and end of reasoning."""
        ...

    @property
    def lead(self) -> str:
        """What the template puts in front of an answer's text although the model samples it."""
        ...

    @property
    def id_form(self) -> str:
        """How an id of a call is made of 32 hexadecimal digits, for `str.format`."""
        ...

    def find(
        self, text: str, tools: Tools, *, is_start: bool, is_end: bool
    ) -> tuple[int, int | None]:
        """Where the first call of a text begins and ends.

        Args:
            text: a part of an answer which may go on.
            tools: that the model was shown.
            is_start: nothing of the answer but reasoning came before.
            is_end: the answer does not go on.

        Returns:
            First character of the call and its end. The end is None where it is not known yet, or
            there is no call: then what is in front of the first is text for certain, and at the
            end that is all.
        """
        ...

    def read(self, block: str, tools: Tools) -> list[ToolCall]:
        """The calls in a block that `find` found.

        Raises:
            NotACall: it is text.
            MalformedCall: it cannot be read.
        """
        ...

    def opening(self, tools: Iterable[str]) -> str | None:
        """A text with which an answer has to begin to be a call of one of these tools.

        None if no text does that.
        """
        ...


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Calls in blocks between two markers; the base of most formats.

    Attributes:
        name, markers, thinking, lead, id_form: see `CallFormat`.
        begin, end: the markers of a block. A block that is not closed ends with the answer.
    """

    name: str
    begin: str
    end: str
    inner: tuple[str, ...] = ()
    thinking: tuple[str, str] = ("<think>", "</think>")
    lead: str = ""
    id_form: str = "call_{:.24}"

    @property
    def markers(self) -> tuple[str, ...]:
        """As `CallFormat.markers`."""
        return (self.begin, self.end, *self.inner, *(mark.strip() for mark in self.thinking))

    def find(
        self, text: str, tools: Tools, *, is_start: bool, is_end: bool
    ) -> tuple[int, int | None]:
        """As `CallFormat.find`. An end marker in an argument does not end the call."""
        candidates = list(find_enclosed(text, self.begin, self.end, is_end=is_end))
        for start, stop in candidates:
            if stop is None:
                return start, None
            try:
                self.read(text[start:stop], tools)
            except MalformedCall:
                continue
            return start, stop
        return candidates[0]  # none can be read: the shortest one

    def read(self, block: str, tools: Tools) -> list[ToolCall]:
        """As `CallFormat.read`."""
        raise NotImplementedError

    def inside(self, block: str) -> str:
        """The text between the markers, without white space around it."""
        return block.removeprefix(self.begin).removesuffix(self.end).strip()


def find_enclosed(
    text: str, opening: str, closing: str | None, *, is_end: bool
) -> Iterable[tuple[int, int | None]]:
    """Where a block between two markers may begin and end: candidates, the first one first.

    Args:
        text: to search.
        opening: the marker in front.
        closing: the one behind, or None if the block goes on to the end.
        is_end: nothing comes behind the text. A block that is not closed ends there.
    """
    start = text.find(opening)
    if start < 0:
        yield len(text) - (0 if is_end else held_back(text, opening)), None
        return
    if closing is not None:
        stop = text.find(closing, start + len(opening))
        while stop >= 0:
            yield start, stop + len(closing)
            stop = text.find(closing, stop + 1)
    yield start, len(text) if is_end else None


def held_back(text: str, marker: str) -> int:
    """Length of the end of the text that may be the beginning of a marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def call_of(value: Any) -> ToolCall:
    """The call that a JSON object says.

    Raises:
        MalformedCall: it says none.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {**value, **value["function"]}
    if not isinstance(value, dict):
        raise MalformedCall(f"a call is a JSON object, and this is {json.dumps(value)[:80]}")
    name = value.get("name", value.get("tool_name"))  # Cohere: tool_name
    if not isinstance(name, str) or not name:
        raise MalformedCall("the call has no name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = load_json(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    call_id = value.get("id")
    return make_call(name, arguments, call_id if isinstance(call_id, str) else None)


def make_call(name: str, arguments: Any, call_id: str | None = None) -> ToolCall:
    """A call with its arguments.

    Raises:
        MalformedCall: they are not an object, or not JSON.
    """
    if not isinstance(arguments, dict):
        raise MalformedCall(f"the arguments of {name} are not an object")
    try:
        return ToolCall.of(name, arguments, call_id or None)
    except ContextError as error:
        raise MalformedCall(str(error)) from None


def load_json(text: str) -> Any:
    """The value of a JSON text; line breaks in strings are allowed, as models write them.

    Raises:
        MalformedCall: it is none.
    """
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"it is not JSON: {error}") from None


def next_json(text: str, place: int) -> tuple[Any, int]:
    """The JSON value that begins at a place, or behind white space there, and its end.

    Raises:
        MalformedCall: there is none.
    """
    place += len(text[place:]) - len(text[place:].lstrip())
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text, place)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"it is not JSON: {error}") from None
    return value, end
