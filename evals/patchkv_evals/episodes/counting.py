"""How long a conversation is in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from patchkv_agents.context import Conversation, render


@dataclass(frozen=True, slots=True)
class Measured:
    """Length of a conversation, generation prompt included, and where each message starts."""

    tokens: int
    starts: tuple[int, ...]


class TokenCounter(Protocol):
    """Counts tokens. Texts need only be counted about right, conversations exactly."""

    def text(self, text: str) -> int:
        """Tokens of a text by itself."""

    def measure(self, conversation: Conversation) -> Measured:
        """Length and message starts of a whole conversation."""


class RenderedCounter:
    """Counts what a tokenizer's chat template makes of a conversation.

    Args:
        tokenizer: a Transformers tokenizer with a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[str, int] = {}

    def text(self, text: str) -> int:
        """Tokens of a text by itself; remembered, since passages come again."""
        count = self._texts.get(text)
        if count is None:
            count = len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
            self._texts[text] = count
        return count

    def measure(self, conversation: Conversation) -> Measured:
        """Length and message starts of a whole conversation."""
        rendered = render(conversation, self._tokenizer)
        return Measured(len(rendered), tuple(start for start, _ in rendered.message_spans))
