"""Lower bounds on the tokens of a context."""

from __future__ import annotations

from typing import Any

import pytest

from patchkv_agents.context import render
from patchkv_agents.context.rendering.lengths import min_tokens, shown_texts

from .samples import agent_messages


@pytest.mark.parametrize("text", ["word " * 40_000, "x" * 90_000, "漢字" * 30_000, " \n" * 50_000])
def test_never_more_than_there_are(text: str, smollm2_tokenizer: Any) -> None:
    tokens = len(smollm2_tokenizer(text, add_special_tokens=False)["input_ids"])
    bound = min_tokens([text], smollm2_tokenizer, stop=10**9)
    assert bound <= tokens
    assert bound > 0.9 * tokens - 64
    assert 500 < min_tokens([text], smollm2_tokenizer, stop=500) < 40_000


def test_texts_of_messages_that_may_be_malformed(smollm2_tokenizer: Any) -> None:
    texts = list(shown_texts(agent_messages()))
    assert min_tokens(texts, smollm2_tokenizer, stop=10**6) <= len(
        render(agent_messages(), smollm2_tokenizer)
    )
    odd = [None, 5, {}, {"content": 7}, {"content": ["a", {"text": "b"}, {"text": 3}, None]}]
    odd += [{"tool_calls": [None, {"function": {"arguments": "c"}}, {"function": []}]}]
    assert list(shown_texts(odd)) == ["a", "b", "c"]
