"""Calls of DeepSeek V3, R1 and V3.1, and of Kimi K2: a name and JSON between markers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from patchkv_agents.context.answers.arguments import Tools
from patchkv_agents.context.answers.formats.base import (
    BlockFormat,
    MalformedCall,
    make_call,
    next_json,
)
from patchkv_agents.context.messages import ToolCall


def _mark(name: str) -> str:
    """One of DeepSeek's markers, which have wide bars and low lines of their own."""
    return f"<\uff5c{name}\uff5c>".replace("_", "\u2581")


@dataclass(frozen=True, slots=True)
class SectionFormat(BlockFormat):
    """Calls in a section: each a header, a separator and a JSON object between markers.

    Attributes:
        call_begin, separator, call_end: the markers of one call.
    """

    call_begin: str = ""
    separator: str = ""
    call_end: str = ""

    def read(self, block: str, tools: Tools) -> list[ToolCall]:
        """As `CallFormat.read`."""
        text = self.inside(block)
        calls: list[ToolCall] = []
        place = 0
        while place < len(text):
            head, separator, _ = text[place:].partition(self.separator)
            if not separator or not head.startswith(self.call_begin):
                raise MalformedCall("a call is a name and a JSON object between its markers")
            start = place + len(head) + len(separator)
            head = head.removeprefix(self.call_begin).strip()
            name, call_id, start = self.heading(head, text, start)
            arguments, place = next_json(text, start)
            calls.append(make_call(name, arguments, call_id))
            rest = text[place:].lstrip("` \r\n\t").removeprefix(self.call_end).lstrip()
            place = len(text) - len(rest)
        if not calls:
            raise MalformedCall("nothing follows the marker")
        return calls

    def heading(self, head: str, text: str, start: int) -> tuple[str, str | None, int]:
        """Name and id of a call, and where its JSON begins.

        Args:
            head: the text in front of the separator.
            text, start: the block, and what follows the separator in it.
        """
        raise NotImplementedError


_TYPED = re.compile(r"\s*([^\s{}]+)\s*\n\s*(?:```json\s*)?(?=\{)")


@dataclass(frozen=True, slots=True)
class DeepSeekFormat(SectionFormat):
    """`NAME`, separator, JSON (V3.1), or `function`, separator, `NAME` and fenced JSON (V3, R1).

    Attributes:
        fenced: whether the model's template writes the latter.
    """

    name: str = "deepseek"
    begin: str = _mark("tool_calls_begin")
    end: str = _mark("tool_calls_end")
    inner: tuple[str, ...] = (_mark("tool_call_begin"), _mark("tool_sep"), _mark("tool_call_end"))
    call_begin: str = _mark("tool_call_begin")
    separator: str = _mark("tool_sep")
    call_end: str = _mark("tool_call_end")
    fenced: bool = False

    def heading(self, head: str, text: str, start: int) -> tuple[str, str | None, int]:
        """As `SectionFormat.heading`."""
        typed = _TYPED.match(text, start)
        if typed is not None:
            return typed[1], None, typed.end()
        if not head:
            raise MalformedCall("the call has no name")
        return head, None, start

    def opening(self, tools: Iterable[str]) -> str:
        """As `CallFormat.opening`."""
        names = list(tools)
        head = f"{self.begin}{self.call_begin}"
        if self.fenced:
            head += f"function{self.separator}"
            return f"{head}{names[0]}\n```json\n" if len(names) == 1 else head
        return f"{head}{names[0]}{self.separator}" if len(names) == 1 else head


_KIMI_ID = re.compile(r"(?:functions\.)?([^\s:]+)(?::\d+)?")


@dataclass(frozen=True, slots=True)
class KimiFormat(SectionFormat):
    """`functions.NAME:NUMBER`, which is the call's id too, separator, JSON."""

    name: str = "kimi"
    begin: str = "<|tool_calls_section_begin|>"
    end: str = "<|tool_calls_section_end|>"
    inner: tuple[str, ...] = (
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    )
    call_begin: str = "<|tool_call_begin|>"
    separator: str = "<|tool_call_argument_begin|>"
    call_end: str = "<|tool_call_end|>"

    def heading(self, head: str, text: str, start: int) -> tuple[str, str | None, int]:
        """As `SectionFormat.heading`."""
        match = _KIMI_ID.fullmatch(head)
        if match is None:
            raise MalformedCall("the call has no name")
        return match[1], head if ":" in head else None, start

    def opening(self, tools: Iterable[str]) -> str:
        """As `CallFormat.opening`."""
        names = list(tools)
        head = f"{self.begin}{self.call_begin}functions."
        return f"{head}{names[0]}:0{self.separator}" if len(names) == 1 else head
