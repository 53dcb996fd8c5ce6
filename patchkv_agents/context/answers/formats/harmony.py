"""Answers of gpt-oss: messages in channels (the Harmony format)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from patchkv_agents.context.answers.answer import Answer, AnswerPiece
from patchkv_agents.context.answers.arguments import Tools
from patchkv_agents.context.answers.formats.base import (
    MalformedCall,
    held_back,
    load_json,
    make_call,
)
from patchkv_agents.context.answers.pieces import AnswerPieces
from patchkv_agents.context.messages import ToolCall

_BODY = "<|message|>"
_CLOSES = ("<|end|>", "<|call|>", "<|return|>")
_OPENS = ("<|start|>", "<|channel|>", "to=functions.")
_ENDS = (*_CLOSES, "<|start|>", "<|channel|>")
_END = re.compile("|".join(re.escape(end) for end in _ENDS))
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """`<|channel|>CHANNEL to=functions.NAME<|message|>TEXT<|end|>`, one message after the other.

    The channel `analysis` is reasoning, others are text; what has a recipient is a call.
    """

    name: str = "harmony"
    markers: tuple[str, ...] = (*_ENDS, _BODY, "<|constrain|>")
    thinking: tuple[str, str] = (f"<|channel|>analysis{_BODY}", "<|end|>")
    lead: str = ""
    id_form: str = "call_{:.24}"

    def find(
        self, text: str, tools: Tools, *, is_start: bool, is_end: bool
    ) -> tuple[int, int | None]:
        """As `CallFormat.find`; answers are parsed by `HarmonyParser`, as messages."""
        return len(text), None

    def read(self, block: str, tools: Tools) -> list[ToolCall]:
        """As `CallFormat.read`: the call of one message."""
        header, body, text = block.partition(_BODY)
        recipient = _RECIPIENT.search(header)
        if not body or recipient is None:
            raise MalformedCall("a call names its recipient in front of its message")
        text = text.strip()
        return [make_call(recipient[1], load_json(text) if text else {})]

    def opening(self, tools: Iterable[str]) -> str:
        """As `CallFormat.opening`."""
        names = list(tools)
        head = "<|channel|>commentary to=functions."
        return f"{head}{names[0]} <|constrain|>json{_BODY}" if len(names) == 1 else head


class HarmonyParser:
    """Parses answers in the Harmony format.

    Args:
        tools: types of the arguments of tools that the model may call; without any, nothing is a
            call.
        prompt: how prompts end, up to the answer: a message may be open.
        salt: see `AnswerPieces`.
    """

    def __init__(self, tools: Tools, *, prompt: str = "", salt: str = "") -> None:
        self._format = HarmonyFormat()
        self._tools = tools
        self._pieces = AnswerPieces(lead="", id_form=self._format.id_form, salt=salt)
        self._rest = ""
        self._gap = ""  # in front of the text of a further message
        self._header: str | None = None  # of the message that is open, None between messages
        last = prompt.rpartition("<|start|>")[2]
        if prompt and _BODY in last and not _END.search(last.partition(_BODY)[2]):
            self._header = last.partition(_BODY)[0]

    @property
    def answer(self) -> Answer:
        """As `AnswerParser.answer`."""
        return self._pieces.answer

    def feed(self, text: str) -> list[AnswerPiece]:
        """As `AnswerParser.feed`."""
        self._rest += text
        while self._step(is_end=False):
            pass
        return self._pieces.take()

    def finish(self) -> list[AnswerPiece]:
        """As `AnswerParser.finish`."""
        while self._step(is_end=True):
            pass
        self._pieces.finish()
        return self._pieces.take()

    def _step(self, *, is_end: bool) -> bool:
        """Take what can be taken; whether there is more to do now."""
        if self._header is None:
            return self._read_header(is_end=is_end)
        end = _END.search(self._rest)
        if self._is_call:
            if end is None and not is_end:
                return False
            self._read_call(self._take(len(self._rest) if end is None else end.start()))
        elif end is None:
            held = 0 if is_end else max(held_back(self._rest, mark) for mark in _ENDS)
            self._add(self._take(len(self._rest) - held))
            return False
        else:
            self._add(self._take(end.start()))
        self._header = None
        return bool(self._rest)

    def _read_header(self, *, is_end: bool) -> bool:
        """Read up to the body of a message; text that has no header is a message too."""
        self._rest = self._rest.lstrip()
        for mark in _CLOSES:
            if self._rest.startswith(mark):
                self._take(len(mark))
                return bool(self._rest)
        if not is_end and any(mark.startswith(self._rest) for mark in (*_CLOSES, *_OPENS)):
            return False
        body = self._rest.find(_BODY)
        if not self._rest.startswith(_OPENS):
            self._open("")
        elif body >= 0:
            self._open(self._take(body))
            self._take(len(_BODY))
        elif is_end:
            self._pieces.content(self._take(len(self._rest)))
        else:
            return False
        return bool(self._rest)

    def _open(self, header: str) -> None:
        self._header = header
        self._gap = "\n\n" if self._pieces.has_content else ""

    @property
    def _is_call(self) -> bool:
        return bool(self._tools) and _RECIPIENT.search(self._header or "") is not None

    def _add(self, text: str) -> None:
        if _CHANNEL.findall(self._header or "")[-1:] == ["analysis"]:
            self._pieces.reasoning(text)
        elif text:
            self._pieces.content(self._gap + text)
            self._gap = ""

    def _read_call(self, text: str) -> None:
        block = f"{self._header}{_BODY}{text}"
        try:
            for call in self._format.read(block, self._tools):
                self._pieces.call(call)
        except MalformedCall as error:
            self._pieces.invalid(block, str(error))

    def _take(self, length: int) -> str:
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken
