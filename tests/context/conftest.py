from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from . import templates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Added as Qwen3 has them: tokens of the model's format which do not count as special.
FORMAT_TOKENS = list(templates.FAMILIES["qwen3"].other)


@pytest.fixture(scope="session")
def tokenizer_with(
    smollm2_tokenizer: PreTrainedTokenizerBase,
) -> Callable[..., PreTrainedTokenizerBase]:
    """Makes a tokenizer with another chat template, to which `<think>` and the like are tokens."""

    def make(template: str, special: Sequence[str] = ()) -> PreTrainedTokenizerBase:
        tokenizer: Any = copy.deepcopy(smollm2_tokenizer)
        tokenizer.add_tokens(FORMAT_TOKENS)
        tokenizer.add_tokens(list(special), special_tokens=True)
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def family_tokenizer(
    tokenizer_with: Callable[..., PreTrainedTokenizerBase],
) -> Callable[[str], PreTrainedTokenizerBase]:
    """The embedded tokenizer with a family's template and control tokens. Do not change it."""

    @functools.cache
    def make(name: str) -> PreTrainedTokenizerBase:
        family = templates.FAMILIES[name]
        return tokenizer_with(family.template, family.special)

    return make


@pytest.fixture(scope="session")
def qwen3(family_tokenizer: Callable[[str], PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    """The embedded tokenizer with Qwen3's template. Do not change it."""
    return family_tokenizer("qwen3")
