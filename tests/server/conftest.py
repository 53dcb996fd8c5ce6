from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from patchkv_agents.recovery import RecoveryPolicy

from ..engine.models import tiny_engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from patchkv_agents.engine import Engine

NewEngine = Callable[..., "Engine"]


@pytest.fixture(scope="session")
def tiny_server_engine(smollm2_tokenizer: PreTrainedTokenizerBase) -> Engine:
    """Random weights behind the embedded model's vocabulary and chat template."""
    return tiny_engine(smollm2_tokenizer, 8192)


@pytest.fixture(scope="session")
def new_engine(tiny_server_engine: Engine) -> NewEngine:
    """Makes engines over the model of `tiny_server_engine`."""

    def make(policy: RecoveryPolicy | None = None, **options: Any) -> Engine:
        model, tokenizer = tiny_server_engine.adapter.model, tiny_server_engine.tokenizer
        return type(tiny_server_engine)(model, tokenizer, policy=policy, **options)

    return make
