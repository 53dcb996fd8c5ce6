"""What a thread generates is what Transformers' own `generate` does, without edits."""

from __future__ import annotations

import pytest
import torch

from patchkv_agents.engine import Engine
from patchkv_agents.engine.generation import SamplingParams
from patchkv_agents.engine.sampler import Sampler
from patchkv_agents.errors import InputError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "departures",
            "description": "Times at which a ferry leaves.",
            "parameters": {
                "type": "object",
                "properties": {"pier": {"type": "string"}},
                "required": ["pier"],
            },
        },
    }
]
CONVERSATIONS = {
    "question": (
        [{"role": "user", "content": "Name the three largest oceans, largest first."}],
        None,
    ),
    "tools": ([{"role": "user", "content": "When does the ferry leave from pier 4?"}], TOOLS),
    "turns": (
        [
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": "Which animal barks?"},
            {"role": "assistant", "content": "A dog."},
            {"role": "user", "content": "And which one purrs, and why?"},
        ],
        None,
    ),
}


def generated(engine, messages, tools=None, seed=0, **options):
    """New ids by `generate`, the end-of-turn token not among them."""
    prompt = engine.tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(seed)
    ids = engine.adapter.model.generate(
        **prompt, pad_token_id=0, eos_token_id=sorted(engine.end_tokens), **options
    )
    ids = ids[0, prompt["input_ids"].shape[1] :].tolist()
    return tuple(ids[:-1] if ids[-1] in engine.end_tokens else ids)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_greedy_answers_are_the_same_token_for_token(smollm2_model, smollm2_tokenizer, name):
    engine, (messages, tools) = Engine(smollm2_model, smollm2_tokenizer), CONVERSATIONS[name]
    reply = engine.thread("parity").generate(messages, tools=tools, max_new_tokens=20)
    expected = generated(engine, messages, tools, max_new_tokens=20, do_sample=False)
    assert reply.token_ids == expected
    assert reply.finish_reason == ("length" if len(expected) == 20 else "stop")
    assert reply.text == smollm2_tokenizer.decode(expected, skip_special_tokens=True)


MESSAGES = CONVERSATIONS["turns"][0]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 40},
        {"temperature": 1.4, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 400, "top_p": 0.5, "repetition_penalty": 1.3},
        {"temperature": 1.2, "min_p": 0.2},
        {"temperature": 2.0, "repetition_penalty": 1.8, "min_p": 0.01},
    ],
    ids=str,
)
def test_a_seed_draws_the_same_tokens(engine, thread, options):
    """The same processors in the same order, and as many random numbers."""
    ours = thread.generate(MESSAGES, max_new_tokens=24, seed=11, **options)
    theirs = generated(
        engine, MESSAGES, seed=11, max_new_tokens=24, do_sample=True, **{"top_k": 0, **options}
    )
    assert ours.token_ids == theirs
    other = thread.generate(MESSAGES, max_new_tokens=24, seed=12, **options)
    assert ours.token_ids != other.token_ids


def test_the_models_own_repetition_penalty_counts(engine, thread, monkeypatch):
    """Qwen2.5 asks for 1.05 to 1.1 in its generation configuration, greedy answers included."""
    without = thread.generate(MESSAGES, max_new_tokens=24).token_ids
    monkeypatch.setattr(engine.adapter.model.generation_config, "repetition_penalty", 0.4)
    own = thread.generate(MESSAGES, max_new_tokens=24).token_ids
    assert own == generated(engine, MESSAGES, max_new_tokens=24, do_sample=False) != without
    turned_off = thread.generate(MESSAGES, max_new_tokens=24, repetition_penalty=1)
    assert turned_off.token_ids == without


def test_penalties_follow_their_formula():
    """Of three tokens with scores 3, 2.4 and 0: each time 0.5 less, and 1 less from the first."""
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=1.0)
    sampler = Sampler(params, [0, 0, 1], None, torch.device("cpu"))  # the prompt does not count
    logits = torch.tensor([3.0, 2.4, 0.0])
    assert [sampler(logits) for _ in range(6)] == [0, 1, 0, 0, 1, 0]
    assert logits.tolist() == pytest.approx([3.0, 2.4, 0.0])  # not changed


def test_log_probabilities_are_those_of_the_model(engine, thread):
    """Against one plain call over prompt and answer; penalties and filters do not change them."""
    reply = thread.generate(
        MESSAGES, max_new_tokens=12, temperature=1.5, top_k=5, seed=4, logprobs=3
    )
    prompt = engine.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    ids = torch.tensor([[*prompt, *reply.token_ids]])
    with torch.inference_mode():
        logits = engine.adapter.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(dim=-1)
    assert len(reply.logprobs) == len(reply.token_ids) == 12
    for row, token, found in zip(expected, reply.token_ids, reply.logprobs, strict=True):
        assert found.token_id == token
        assert found.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [token for token, _ in found.top] == row.topk(3).indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(
            row.topk(3).values.tolist(), abs=1e-4
        )


def test_streams_tell_the_log_probabilities_of_each_token_once(thread):
    chunks = list(thread.stream(MESSAGES, max_new_tokens=20, temperature=1.0, seed=2, logprobs=0))
    told = [each for chunk in chunks for each in chunk.logprobs]
    assert tuple(told) == chunks[-1].reply.logprobs
    assert [each.token_id for each in told] == list(chunks[-1].reply.token_ids)
    assert all(each.top == () for each in told)
    (unasked,) = {thread.generate(MESSAGES, max_new_tokens=2).logprobs}
    assert unasked is None


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 1.5},
        {"repetition_penalty": 0},
        {"repetition_penalty": "1.1"},
        {"frequency_penalty": 2.5},
        {"presence_penalty": -3},
        {"logprobs": 21},
        {"logprobs": True},
    ],
    ids=str,
)
def test_wrong_options_are_refused(thread, options):
    with pytest.raises(InputError, match=next(iter(options))):
        thread.generate(MESSAGES, **options)
