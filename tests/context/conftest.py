from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from . import templates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Added as Qwen3 has them: tokens of the model's format which do not count as special.
FORMAT_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
FORMAT_TOKENS += ["<think>", "</think>"]


@pytest.fixture(scope="session")
def tokenizer_with(
    smollm2_tokenizer: PreTrainedTokenizerBase,
) -> Callable[[str], PreTrainedTokenizerBase]:
    """Makes a tokenizer with another chat template, to which `<think>` and the like are tokens."""

    def make(template: str) -> PreTrainedTokenizerBase:
        tokenizer: Any = copy.deepcopy(smollm2_tokenizer)
        tokenizer.add_tokens(FORMAT_TOKENS)
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def qwen_like(tokenizer_with: Callable[[str], PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    """A tokenizer with a template that has Qwen3's habits. Do not change it."""
    return tokenizer_with(templates.QWEN_LIKE)
