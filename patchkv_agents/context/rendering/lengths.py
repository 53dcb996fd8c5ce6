"""A lower bound on the tokens of a context, found without rendering it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

PIECE = 16_384
"""Characters that are encoded at a time."""
BORDER_TOKENS = 8
"""Tokens that cutting a text at a border may add, and more."""


def min_tokens(texts: Iterable[str], tokenizer: Any, *, stop: int) -> int:
    """At least so many tokens the texts have; counts no further than a little beyond `stop`.

    Args:
        texts: that a context shows.
        tokenizer: a Transformers tokenizer.
        stop: tokens that are too many.
    """
    count = 0
    for text in texts:
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
            count += max(0, len(ids) - BORDER_TOKENS)
            if count > stop:
                return count
    return count


def shown_texts(messages: Iterable[Any]) -> Iterator[str]:
    """The texts of messages in OpenAI's form, which need not be well formed."""
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        calls = message.get("tool_calls")
        for content in (message.get("content"), message.get("output")):
            for part in content if isinstance(content, list) else [content]:
                text = part.get("text") if isinstance(part, Mapping) else part
                if isinstance(text, str):
                    yield text
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, str):
                yield arguments
