from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ..engine.models import tiny_engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from patchkv_agents.engine import Engine


@pytest.fixture(scope="session")
def tiny_chat_engine(smollm2_tokenizer: PreTrainedTokenizerBase) -> Engine:
    """Random weights behind the embedded model's vocabulary and chat template."""
    return tiny_engine(smollm2_tokenizer, 4096)


@pytest.fixture
def chat_engine(tiny_chat_engine: Engine) -> Engine:
    """Another engine over the model of `tiny_chat_engine`, for one test alone."""
    return type(tiny_chat_engine)(tiny_chat_engine.adapter.model, tiny_chat_engine.tokenizer)


@pytest.fixture(scope="session")
def tiny_model_folder(tiny_chat_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of `tiny_chat_engine` as a folder that can be loaded."""
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_chat_engine.adapter.model.save_pretrained(folder)
    tiny_chat_engine.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def embedded_chat_engine(
    smollm2_model: PreTrainedModel, smollm2_tokenizer: PreTrainedTokenizerBase
) -> Engine:
    from patchkv_agents.engine import Engine

    return Engine(smollm2_model, smollm2_tokenizer)
