"""Takes an answer apart while it is being written."""

from __future__ import annotations

from typing import Protocol

from patchkv_agents.context.answers.answer import Answer, AnswerPiece
from patchkv_agents.context.answers.arguments import Tools
from patchkv_agents.context.answers.formats.base import (
    CallFormat,
    MalformedCall,
    NotACall,
    held_back,
)
from patchkv_agents.context.answers.pieces import AnswerPieces


class AnswerParser(Protocol):
    """Takes the text of an answer in pieces of any size. How it is cut makes no difference."""

    def feed(self, text: str) -> list[AnswerPiece]:
        """Take more text; returns what is certain now and was not returned before."""
        ...

    def finish(self) -> list[AnswerPiece]:
        """The rest, once there is no more text."""
        ...

    @property
    def answer(self) -> Answer:
        """The whole answer, once it is finished."""
        ...


class FormatParser:
    """Parses answers in one of our formats.

    Args:
        call_format: how the model writes calls.
        tools: types of the arguments of tools that the model may call; without any, nothing is a
            call.
        in_reasoning: the prompt ended within the reasoning.
        salt: see `AnswerPieces`.
    """

    def __init__(
        self,
        call_format: CallFormat,
        tools: Tools,
        *,
        in_reasoning: bool = False,
        salt: str = "",
    ) -> None:
        self._format = call_format
        self._tools = tools
        self._pieces = AnswerPieces(lead=call_format.lead, id_form=call_format.id_form, salt=salt)
        self._rest = ""
        self._step = self._in_reasoning if in_reasoning else self._before_reasoning

    @property
    def answer(self) -> Answer:
        """As `AnswerParser.answer`."""
        return self._pieces.answer

    def feed(self, text: str) -> list[AnswerPiece]:
        """As `AnswerParser.feed`."""
        self._rest += text
        while self._step(False):
            pass
        return self._pieces.take()

    def finish(self) -> list[AnswerPiece]:
        """As `AnswerParser.finish`."""
        while self._step(True):
            pass
        self._pieces.finish()
        return self._pieces.take()

    # Each step takes what it can from the rest, and says whether there is more to do now.

    def _before_reasoning(self, is_end: bool) -> bool:
        marker, text = self._format.thinking[0], self._rest.lstrip()
        if text.startswith(marker):
            self._rest = text[len(marker) :]
            self._step = self._in_reasoning
        elif marker.startswith(text) and not is_end:
            return False
        else:
            self._step = self._in_text
        return True

    def _in_reasoning(self, is_end: bool) -> bool:
        marker = self._format.thinking[1]
        reasoning, found, behind = self._rest.partition(marker)
        if found:
            self._pieces.reasoning(reasoning)
            self._rest, self._step = behind, self._in_text
            return True
        kept = 0 if is_end else held_back(self._rest, marker)
        self._pieces.reasoning(self._take(len(self._rest) - kept))
        return False

    def _in_text(self, is_end: bool) -> bool:
        if not self._tools:
            self._pieces.content(self._take(len(self._rest)))
            return False
        start, stop = self._format.find(
            self._rest, self._tools, is_start=not self._pieces.has_content, is_end=is_end
        )
        self._pieces.content(self._take(start))
        if stop is None:
            return False
        self._read(self._take(stop - start))
        return bool(self._rest)

    def _take(self, length: int) -> str:
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken

    def _read(self, block: str) -> None:
        try:
            for call in self._format.read(block, self._tools):
                self._pieces.call(call)
        except NotACall:
            self._pieces.content(block)
        except MalformedCall as error:
            self._pieces.invalid(block, str(error))
