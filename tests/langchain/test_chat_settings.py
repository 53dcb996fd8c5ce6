"""What LangChain asks of a chat model besides answers: keys of its caches, counts of tokens."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, trim_messages
from langchain_core.tools import tool
from pydantic import ValidationError

from patchkv_agents.engine import Engine
from patchkv_agents.errors import ContextError, InputError, ProfileError
from patchkv_langchain import ChatPatchKV, chat_engines
from patchkv_langchain.chat_engines import policy_of

from ..engine.models import tiny_engine
from ..profiling.profiles import POLICY, passed, profile_of
from .agents import SHORT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = [
    SystemMessage("Be brief."),
    HumanMessage("What is in the hall?"),
    AIMessage("A clock."),
    HumanMessage("And in the <|im_end|> garden?"),
]


@tool
def look(place: str) -> str:
    """Look at a place."""
    return place


def test_a_cache_serves_the_same_settings(chat_engine: Engine, tiny_chat_engine: Engine) -> None:
    cache = InMemoryCache()
    first = ChatPatchKV(engine=chat_engine, max_tokens=2, cache=cache).invoke("Hi")
    same = ChatPatchKV(engine=tiny_chat_engine, max_tokens=2, cache=cache).invoke("Hi")
    assert same.id == first.id


@pytest.mark.parametrize(
    "settings",
    [
        {"template_args": {"enable_thinking": False}},
        {"answer_style": "llama3"},
        {"policy": SHORT.varied(window_tokens=16)},
    ],
)
def test_a_cache_does_not_serve_other_settings(
    tiny_chat_engine: Engine, settings: dict[str, Any]
) -> None:
    cache = InMemoryCache()
    given: dict[str, Any] = {"engine": tiny_chat_engine, "max_tokens": 2, "cache": cache}
    first = ChatPatchKV(**given, policy=SHORT).invoke("Hi")
    other = ChatPatchKV(**{**given, "policy": SHORT, **settings}).invoke("Hi")
    assert other.id != first.id


def test_a_cache_does_not_serve_another_engine(
    tiny_chat_engine: Engine, smollm2_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Both are called by the default name of a model."""
    cache = InMemoryCache()
    torch.manual_seed(7)
    other = tiny_engine(smollm2_tokenizer, 4096)
    with torch.no_grad():
        other.adapter.model.get_output_embeddings().weight.neg_()
    first = ChatPatchKV(engine=tiny_chat_engine, max_tokens=4, cache=cache).invoke("Hi")
    second = ChatPatchKV(engine=other, max_tokens=4, cache=cache).invoke("Hi")
    assert second.content != first.content


def test_caches_know_a_profile_by_what_it_says(tmp_path: Path) -> None:
    file, copy = tmp_path / "profile.json", tmp_path / "copy.json"
    passed(profile_of()).save(file)
    passed(profile_of()).save(copy)

    def key(profile: Any) -> str:
        return ChatPatchKV(recovery_profile=profile)._get_llm_string()

    before = key(file)
    assert before == key(copy) == key(passed(profile_of())) != key(None)
    profile_of().save(file)
    assert key(file) not in (before, key(None))  # without its pass, recovery is exact
    passed(profile_of(POLICY.varied(window_tokens=16))).save(file)
    assert key(file) != before


@pytest.mark.parametrize("tools", [[], [look]])
def test_tokens_are_counted_as_the_model_gets_them(
    tiny_chat_engine: Engine, tools: list[Any]
) -> None:
    model = ChatPatchKV(engine=tiny_chat_engine, max_tokens=1)
    usage: Any = (model.bind_tools(tools) if tools else model).invoke(CONTEXT).usage_metadata
    assert model.get_num_tokens_from_messages(CONTEXT, tools=tools) == usage["input_tokens"]
    assert model.get_num_tokens_from_messages([]) == 0
    assert model.get_num_tokens("A clock.") == len(model.get_token_ids("A clock.")) == 3
    assert ChatPatchKV(custom_get_token_ids=lambda _: [1]).get_num_tokens("A clock.") == 1


def test_a_context_is_trimmed_by_the_models_count(tiny_chat_engine: Engine) -> None:
    model = ChatPatchKV(engine=tiny_chat_engine, max_tokens=1)
    page = HumanMessage("The hall has a clock. " * 30)
    given = [CONTEXT[0], page, *CONTEXT[2:]]
    limit = model.get_num_tokens_from_messages(given) - 1
    kept = trim_messages(given, max_tokens=limit, token_counter=model, include_system=True)
    assert [message.type for message in kept] == ["system", "ai", "human"]


def test_a_part_that_the_template_refuses_counts_by_its_texts(
    smollm2_tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer = copy.deepcopy(smollm2_tokenizer)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('a user first') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    model = ChatPatchKV(engine=tiny_engine(tokenizer, 500))
    assert model.get_num_tokens_from_messages([AIMessage("A clock.")]) == 3
    picture = HumanMessage([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}])
    with pytest.raises(ContextError):
        model.get_num_tokens_from_messages([picture])


def test_a_model_is_loaded_with_its_profile(
    tiny_chat_engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loads: list[tuple[str, dict[str, Any]]] = []

    def load(name: str, **options: Any) -> Engine:
        loads.append((name, options))
        return tiny_chat_engine

    monkeypatch.setattr(Engine, "from_pretrained", load)
    file = tmp_path / "profile.json"
    with pytest.raises(ProfileError, match="there is no profile"):
        ChatPatchKV(recovery_profile=file)  # not only at the first call
    profile = profile_of()
    profile.save(file)
    for given in (file, str(file), profile):
        model = ChatPatchKV(model="of/profile", recovery_profile=given)
        model.load()
        assert loads.pop() == ("of/profile", {"recovery_profile": given})
        model.load("another/model")  # has another fingerprint
        assert loads.pop() == ("another/model", {})
        chat_engines._engines.clear()
    for wrong in ({"recovery_profile": 7}, {"recovery_profile": file, "engine": tiny_chat_engine}):
        with pytest.raises(ValueError, match="recovery_profile"):
            ChatPatchKV(**wrong)


def test_the_default_policy_is_the_profiles(tiny_chat_engine: Engine) -> None:
    fitted = replace(SHORT, name="patchkv")
    profile = passed(profile_of(fitted, fingerprint=tiny_chat_engine.fingerprint))
    model, tokenizer = tiny_chat_engine.adapter.model, tiny_chat_engine.tokenizer
    engine = Engine(model, tokenizer, recovery_profile=profile)
    replies = [
        ChatPatchKV(engine=engine, max_tokens=2, policy=policy).invoke("Hi")
        for policy in (None, "default", "exact")
    ]
    assert [reply.response_metadata["recovery"]["policy"] for reply in replies] == [
        "patchkv", "patchkv", "exact"
    ]  # fmt: skip
    assert policy_of("default", profile) == fitted


@pytest.mark.parametrize("where", ["model", "call"])
def test_no_tokens_at_all_are_an_error(tiny_chat_engine: Engine, where: str) -> None:
    """`max_tokens=0` in a call was taken for none given."""
    limit: dict[str, Any] = {"max_tokens": 0}
    model = ChatPatchKV(engine=tiny_chat_engine, **(limit if where == "model" else {}))
    with pytest.raises(InputError, match="max_new_tokens is 0"):
        model.invoke("Hi", **(limit if where == "call" else {}))


@pytest.mark.parametrize("name", ["polcy", "temprature", "base_url"])
def test_an_unknown_argument_is_an_error(name: str) -> None:
    """`ChatPatchKV(polcy="default")` recovered nothing, and said nothing."""
    with pytest.raises(ValidationError, match=rf"unknown arguments \['{name}'\]") as error:
        ChatPatchKV(**{name: "default"})
    assert ("did you mean ['policy']" in str(error.value)) == (name == "polcy")


@pytest.mark.parametrize(
    "given",
    [
        {"user": "ann"},
        {"n": 1},
        {"stream_usage": True},
        {"parallel_tool_calls": None},
        {"temperature": None, "top_p": None, "seed": None, "max_tokens": None},
        {"max_tokens": -1},
    ],
)
def test_arguments_of_other_chat_models_change_nothing(
    tiny_chat_engine: Engine, given: dict[str, Any]
) -> None:
    model = ChatPatchKV(engine=tiny_chat_engine, max_tokens=3)
    assert model.invoke("Hi", **given).content == model.invoke("Hi").content


def test_max_completion_tokens_limits_the_answer(tiny_chat_engine: Engine) -> None:
    model = ChatPatchKV(engine=tiny_chat_engine, max_tokens=9)
    usage = model.invoke("Hi", max_completion_tokens=2).usage_metadata
    assert usage is not None and usage["output_tokens"] == 2


@pytest.mark.parametrize("given", [{"n": 2}, {"logit_bias": {}}, {"max_token": 3}])
def test_what_cannot_be_done_is_refused(tiny_chat_engine: Engine, given: dict[str, Any]) -> None:
    model = ChatPatchKV(engine=tiny_chat_engine, max_tokens=3)
    with pytest.raises(InputError, match=next(iter(given))):
        model.invoke("Hi", **given)
