"""The demo's text, and the builder that cuts it to a wanted length."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from patchkv_agents.context import render
from patchkv_agents.errors import InputError
from patchkv_agents.profiling.episode import DEFAULT_TOKENS, Episode, build_episode

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Messages = list[dict[str, Any]]


def fake_count(messages: Messages, tools: Messages) -> int:
    """Count as a tokenizer might: by words and marks, with five tokens around each message."""
    text = [message["content"] for message in messages]
    text += [json.dumps(message["tool_calls"]) for message in messages if "tool_calls" in message]
    text.append(json.dumps(tools))
    return 5 * len(messages) + sum(len(re.findall(r"\w{1,7}|[^\w\s]", part)) for part in text)


def limits() -> tuple[int, int]:
    """Read the shortest and the longest possible episode from the errors that name them."""
    named = []
    for tokens in (1, 1_000_000):
        with pytest.raises(InputError, match=r"--tokens \d+ or (more|fewer)") as caught:
            build_episode(tokens, fake_count)
        named.append(int(re.findall(r"--tokens (\d+)", str(caught.value))[0]))
    return named[0], named[1]


def edit_position(episode: Episode) -> float:
    start = fake_count(episode.old[: episode.edited_index], episode.tools)
    return start / fake_count(episode.old, episode.tools)


@pytest.fixture(scope="module")
def whole() -> Episode:
    """The episode with all of its text."""
    return build_episode(limits()[1], fake_count)


def test_errors_name_lengths_that_work_and_that_are_the_limits() -> None:
    smallest, largest = limits()
    assert smallest < 1100
    assert largest > 7500
    for tokens in (smallest, largest):
        episode = build_episode(tokens, fake_count)
        sizes = [fake_count(version, episode.tools) for version in (episode.old, episode.new)]
        assert max(sizes) == tokens
    for tokens in (smallest - 1, largest + 1):
        with pytest.raises(InputError):
            build_episode(tokens, fake_count)


@pytest.mark.parametrize("tokens", [3000, 3333, 4000, DEFAULT_TOKENS, 5000, 6500, 7001, 7500])
def test_length_is_reached_from_below_and_the_edit_stays_at_one_fifth(tokens: int) -> None:
    episode = build_episode(tokens, fake_count)
    sizes = [fake_count(version, episode.tools) for version in (episode.old, episode.new)]
    assert 0.97 * tokens <= max(sizes) <= tokens
    assert 0.17 <= edit_position(episode) <= 0.23


def test_every_length_is_kept_from_below() -> None:
    smallest, largest = limits()
    for tokens in range(smallest, largest, 149):
        episode = build_episode(tokens, fake_count)
        sizes = [fake_count(version, episode.tools) for version in (episode.old, episode.new)]
        assert max(sizes) <= tokens


def test_few_counts_are_made() -> None:
    calls = 0

    def counting(messages: Messages, tools: Messages) -> int:
        nonlocal calls
        calls += 1
        return fake_count(messages, tools)

    for tokens in (1000, 2500, DEFAULT_TOKENS, 7000):
        calls = 0
        build_episode(tokens, counting)
        assert 0 < calls <= 10


def test_versions_differ_in_the_result_of_one_tool_only(whole: Episode) -> None:
    differing = [
        index
        for index, (old, new) in enumerate(zip(whole.old, whole.new, strict=True))
        if old != new
    ]
    assert differing == [whole.edited_index]
    old, new = whole.old[whole.edited_index], whole.new[whole.edited_index]
    assert old["role"] == "tool"
    assert {**old, "content": ""} == {**new, "content": ""}


def test_the_changed_facts_appear_nowhere_but_in_the_edited_result(whole: Episode) -> None:
    """Text that repeats them would give the answer away, or keep the stale one standing."""
    edited = [version[whole.edited_index]["content"] for version in (whole.old, whole.new)]
    assert whole.answer_old in edited[0]
    assert whole.answer_new in edited[1]
    assert whole.answer_old not in edited[1]
    assert whole.answer_new not in edited[0]
    others = [m for index, m in enumerate(whole.old) if index != whole.edited_index]
    rest = json.dumps(others, ensure_ascii=False)
    facts = {*re.findall(r"\d{1,2}:\d\d", " ".join(edited)), "ice house", "fuel dock", "berth"}
    assert len(facts) >= 9
    assert {fact for fact in facts if fact in rest} == set()
    assert re.findall(r"(?i)piers?\W+\w*\d", rest) == []


def test_first_request_and_last_message_ask_the_question(whole: Episode) -> None:
    assert [message["role"] for message in whole.old[:3]] == ["system", "user", "assistant"]
    assert whole.question in whole.old[1]["content"]
    assert whole.old[-1]["role"] == "user"
    assert whole.question in whole.old[-1]["content"]
    assert not any("{" in message["content"] for message in whole.old)


def test_each_tool_call_fits_its_schema_and_is_answered(whole: Episode) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in whole.tools}
    ids = []
    for message, following in zip(whole.old, whole.old[1:], strict=False):
        for call in message.get("tool_calls", []):
            function = call["function"]
            assert call["type"] == "function"
            assert list(function["arguments"]) == schemas[function["name"]]["required"]
            assert following["role"] == "tool"
            assert following["tool_call_id"] == call["id"]
            assert following["name"] == function["name"]
            ids.append(call["id"])
    assert len(ids) == len(set(ids)) == sum(m["role"] == "tool" for m in whole.old)


def test_passages_are_distinct_and_of_readable_length(whole: Episode) -> None:
    results = [m["content"] for m in whole.old if m["role"] == "tool"]
    results.remove(whole.old[whole.edited_index]["content"])
    assert len(results) >= 20
    assert all(110 <= len(result.split()) <= 300 for result in results)
    sentences = re.split(r"(?<=[.!?])\s+|\n", "\n".join(results))
    long = [sentence for sentence in sentences if len(sentence.split()) > 5]
    assert len(long) == len(set(long))


def test_same_arguments_give_equal_episodes_that_share_nothing() -> None:
    first = build_episode(3000, fake_count)
    second = build_episode(3000, fake_count)
    assert first == second
    first.old[2]["tool_calls"][0]["function"]["arguments"]["query"] = "changed"
    first.tools.clear()
    assert first.new == second.new
    assert second.tools != []


def test_module_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, patchkv_agents.profiling.episode as episode\n"
        "episode.build_episode(1500, lambda m, t: sum(len(x['content']) for x in m) // 4 + 300)\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("tokens", [DEFAULT_TOKENS, 8064])
def test_lengths_and_spans_with_the_embedded_models_tokenizer(
    tokens: int, smollm2_tokenizer: PreTrainedTokenizerBase
) -> None:
    def count(messages: Messages, tools: Messages) -> int:
        return len(render(messages, smollm2_tokenizer, tools=tools).token_ids)

    episode = build_episode(tokens, count)
    spans = []
    for version in (episode.old, episode.new):
        rendered = render(version, smollm2_tokenizer, tools=episode.tools)
        assert rendered.verified
        assert 0.97 * tokens <= len(rendered.token_ids) <= tokens
        spans.append(rendered.message_spans[episode.edited_index])
    assert spans[0][0] == spans[1][0]
    assert 0.17 <= spans[0][0] / tokens <= 0.23
    assert all(60 <= stop - start <= 150 for start, stop in spans)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1200, DEFAULT_TOKENS, 8000])
def test_the_embedded_model_copies_the_fact_that_its_context_holds(
    tokens: int, smollm2_model: PreTrainedModel, smollm2_tokenizer: PreTrainedTokenizerBase
) -> None:
    import torch

    def count(messages: Messages, tools: Messages) -> int:
        return len(render(messages, smollm2_tokenizer, tools=tools).token_ids)

    episode = build_episode(tokens, count)
    cases = ((episode.old, episode.answer_old), (episode.new, episode.answer_new))
    for messages, answer in cases:
        token_ids = render(messages, smollm2_tokenizer, tools=episode.tools).token_ids
        prompt = torch.from_numpy(token_ids.copy())[None]
        model: Any = smollm2_model
        with torch.inference_mode():
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=24,
                do_sample=False,
            )
        assert answer in smollm2_tokenizer.decode(output[0, prompt.shape[1] :])
