"""Takes an answer apart by the response template of its tokenizer, through Transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from patchkv_agents.context.answers.answer import Answer, AnswerPiece
from patchkv_agents.context.answers.formats.base import MalformedCall, call_of
from patchkv_agents.context.answers.pieces import AnswerPieces
from patchkv_agents.context.frozen import FrozenJson

_REASONING = ("thinking", "reasoning", "reasoning_content")


def response_template(tokenizer: Any) -> Any | None:
    """The tokenizer's response template, if it has one and this Transformers can use it."""
    template = getattr(tokenizer, "response_template", None)
    if template is None:
        return None
    try:
        import transformers.utils.chat_parsing  # noqa: F401  not in the oldest releases
    except ImportError:
        return None
    return template


class TemplateParser:
    """Parses answers by a response template.

    Args:
        template: the tokenizer's `response_template`.
        prompt: text of a prompt, up to the answer.
        tools: that the model may call.
        id_form, salt: see `AnswerPieces`.
    """

    def __init__(
        self,
        template: Any,
        prompt: str,
        tools: Sequence[FrozenJson],
        *,
        id_form: str,
        salt: str,
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._parser = ResponseParser(
            template, prefix=prompt, tools=[tool.load() for tool in tools] or None
        )
        self._pieces = AnswerPieces(lead="", id_form=id_form, salt=salt)
        self._call_text = ""  # of the call that is being written
        self._error: str | None = None  # why the rest of the answer is taken as text

    @property
    def answer(self) -> Answer:
        """As `AnswerParser.answer`."""
        return self._pieces.answer

    def feed(self, text: str) -> list[AnswerPiece]:
        """As `AnswerParser.feed`."""
        # One by one: an error loses the events of its call, and only those.
        for number, character in enumerate(text):
            if self._error is not None:
                self._pieces.content(text[number:])
                break
            self._try(partial(self._parser.feed, character))
        return self._pieces.take()

    def finish(self) -> list[AnswerPiece]:
        """As `AnswerParser.finish`."""
        if self._error is None:
            self._try(lambda: self._parser.finalize()[1])
        self._pieces.finish()
        return self._pieces.take()

    def _try(self, step: Callable[[], Sequence[dict[str, Any]]]) -> None:
        try:
            self._take(step())
        except (ValueError, MalformedCall) as error:  # Transformers' are ValueErrors
            self._error = str(error)
            self._pieces.invalid(self._call_text, self._error)

    def _take(self, events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            field, kind = event["field"], event["type"]
            if kind == "region_chunk" and field == "content":
                self._pieces.content(event["text"])
            elif kind == "region_chunk" and field in _REASONING:
                self._pieces.reasoning(event["text"])
            elif kind == "region_chunk" and field == "tool_calls":
                self._call_text += event["text"]
            elif kind == "region_close" and field == "tool_calls":
                value = event["value"]
                for call in value if isinstance(value, list) else [value]:
                    self._pieces.call(call_of(call))
                self._call_text = ""
