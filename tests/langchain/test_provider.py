"""Models by name, as LangChain's programs give them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from langchain.agents import create_agent
from langchain.chat_models import base, init_chat_model
from langchain_core.messages import HumanMessage

from patchkv_agents.errors import InputError
from patchkv_langchain import ChatPatchKV, register_provider


@pytest.fixture(autouse=True)
def providers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(base, "_BUILTIN_PROVIDERS", dict(base._BUILTIN_PROVIDERS))
    base._get_chat_model_creator.cache_clear()
    yield
    base._get_chat_model_creator.cache_clear()


def test_a_model_is_made_by_its_name(tiny_model_folder: str) -> None:
    with pytest.raises(ValueError, match="patchkv"):
        init_chat_model("smollm2", model_provider="patchkv")
    for _ in range(2):
        register_provider()
    model = init_chat_model("patchkv:smollm2", policy="default", max_tokens=7)
    assert isinstance(model, ChatPatchKV)
    assert (model.model, model.policy, model.max_tokens) == ("smollm2", "default", 7)
    agent = create_agent(
        init_chat_model(tiny_model_folder, model_provider="patchkv", max_tokens=2), []
    )
    answer = agent.invoke({"messages": [HumanMessage("Hi")]})["messages"][-1]
    assert answer.response_metadata["recovery"]["is_exact"]


def test_names_can_be_chosen_with_a_call(tiny_model_folder: str) -> None:
    register_provider()
    model = init_chat_model(configurable_fields=("model", "model_provider"), max_tokens=2)
    chosen = {"configurable": {"model": tiny_model_folder, "model_provider": "patchkv"}}
    assert model.invoke("Hi", config=chosen).response_metadata["model_name"] == tiny_model_folder


def test_another_release_of_langchain_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(base, "_BUILTIN_PROVIDERS")
    with pytest.raises(InputError, match="ChatPatchKV"):
        register_provider()
