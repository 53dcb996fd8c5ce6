"""Which special tokens of an answer are shown."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The special tokens of a vocabulary, by id."""
    added = tokenizer.added_tokens_decoder.items()
    return {token_id: str(token.content) for token_id, token in added if token.special}


def hidden_tokens(tokenizer: Any, keep_special: Collection[str]) -> frozenset[int]:
    """Ids of the special tokens that are not to be shown: all but these."""
    special = special_tokens(tokenizer).items()
    return frozenset(token_id for token_id, text in special if text not in keep_special)
