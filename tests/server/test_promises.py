"""What programs send beside the usual, and what they look for in answers."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from patchkv_agents.engine import Engine
from patchkv_server.chat_answers import token_bytes

from ..engine.models import tiny_engine
from .conftest import NewEngine
from .serving import MODEL, Served, serving, talk

HELLO = [{"role": "user", "content": "Hello."}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}
# The prompt for an answer ends within the reasoning.
THINKING = """\
{%- for t in tools or [] %}{{- t | tojson }}{% endfor %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>\\n{"name": "' + c.function.name
    + '", "arguments": ' }}{{- c.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def served(new_engine: NewEngine) -> Iterator[Served]:
    with serving(new_engine()) as served:
        yield served


def post(served: Served, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    return httpx.post(served.url + path, json={"model": MODEL, "max_tokens": 2, **body}, timeout=60)


@pytest.mark.parametrize(
    "body",
    [
        *({"top_k": -1}, {"seed": -1}, {"max_tokens": -1, "max_completion_tokens": 2}),
        *({"stop": [""]}, {"stop": ""}, {"stop": None}, {"stop": []}, {"max_tokens": 2.0}),
        *({"function_call": "none"}, {"functions": []}, {"tools": [], "tool_choice": "auto"}),
        *({"logit_bias": {}}, {"n": None}, {"stream_options": None}, {"temperature": 1e-7}),
        *({"best_of": 1}, {"ignore_eos": False}, {"add_generation_prompt": True}),
        *({"response_format": {"type": "text"}}, {"parallel_tool_calls": None}),
        *({"reasoning_effort": "low"}, {"metadata": {"a": "b"}}, {"tools": None}),
    ],
    ids=json.dumps,
)
def test_values_that_mean_nothing_in_particular(served: Served, body: dict[str, Any]) -> None:
    """-1 and the like were refused, and with them each request of some clients."""
    answer = post(served, messages=HELLO, **body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, None),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"best_of": 3}, "best_of"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"stop": [5]}, "stop[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"stream_options": "x"}, "stream_options"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "{", "prefix": True}]}, "prefix"),
    ],
)
def test_what_is_not_done_is_refused(served: Served, body: dict[str, Any], field: str) -> None:
    """An answer that was to be gone on with was closed, and begun anew, without a word."""
    answer = post(served, **{"messages": HELLO, **body})
    assert answer.status_code == 400
    if field is not None:
        assert answer.json()["error"]["param"].endswith(field)
        assert field in answer.json()["error"]["message"]


def test_conversations_that_other_programs_made(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": ""}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [
        {"role": "user", "content": "Hello.", "id": 1},
        {"role": "assistant", "content": None, "tool_calls": [call], "id": 1},
        {"role": "tool", "tool_call_id": "c1", "id": "x"},
        {"role": "tool", "tool_call_id": "gone", "content": None, "id": "x"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "tool", "tool_call_id": "c1", "content": [picture]},
        *HELLO,
    ]
    answer = post(served, messages=messages, tools=[TOOL])
    assert answer.status_code == 200, answer.text
    assert answer.json()["recovery"]["notes"] == [
        "message 5: a part of type 'image_url' in a result is left out"
    ]


def test_overflow_in_the_words_that_programs_look_for(served: Served) -> None:
    answer = post(served, messages=[{"role": "user", "content": "so many words " * 3000}])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "this model's maximum context length is 8192 tokens" in error["message"]


@pytest.fixture(scope="module")
def thinking(smollm2_tokenizer: Any) -> Engine:
    tokenizer = copy.deepcopy(smollm2_tokenizer)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.chat_template = THINKING
    return tiny_engine(tokenizer, 2048)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_a_forced_call_ends_the_reasoning(thinking: Engine, choice: Any) -> None:
    """It was put into the reasoning, and came back as such."""
    with serving(thinking) as served:
        answer = post(served, messages=HELLO, tools=[TOOL], tool_choice=choice, max_tokens=30)
    message = answer.json()["choices"][0]["message"]
    assert not message.get("reasoning_content")
    assert message["content"].startswith('<tool_call>\n{"name": "find", "arguments":')


def test_bytes_of_tokens_are_their_own(smollm2_tokenizer: Any, served: Served) -> None:
    """Parts of characters were told as those of the replacement character."""
    for text in ("plain words", " Zoë 漢字 \U0001f642\u200d\u2195\ufe0f", "\t\n  <|im_end|>"):
        ids = smollm2_tokenizer(text)["input_ids"]
        own = [token_bytes(smollm2_tokenizer, token_id) for token_id in ids]
        assert b"".join(own) == text.encode()
    answer = post(served, messages=HELLO, logprobs=True, max_tokens=8).json()["choices"][0]
    said = b"".join(bytes(token["bytes"]) for token in answer["logprobs"]["content"])
    assert said.decode() == answer["message"]["content"]


def test_completions_of_texts(served: Served) -> None:
    client, text = (
        served.client(),
        "".join(f"In depot {n} there were {n} lamps. " for n in range(30)),
    )
    whole: Any = client.completions.create(model=MODEL, prompt=text, max_tokens=6)
    tokens = len(served.engine.tokenizer(text)["input_ids"])
    assert whole.usage.prompt_tokens == tokens  # no template around it
    chunks = list(client.completions.create(model=MODEL, prompt=text, max_tokens=6, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    longer: Any = client.completions.create(model=MODEL, prompt=f"{text}And so", max_tokens=2)
    assert longer.usage.prompt_tokens_details.cached_tokens >= tokens - 40
    assert longer.recovery["thread"] == whole.recovery["thread"]
    for wrong in (["a", "b"], "", [1, 2]):
        with pytest.raises(openai.BadRequestError, match="prompt"):
            client.completions.create(model=MODEL, prompt=wrong)  # type: ignore[arg-type]


def test_control_tokens_of_a_text_are_such(served: Served) -> None:
    body = {"prompt": "<|im_start|>user\nHi<|im_end|>\n"}
    ids = served.engine.tokenizer(body["prompt"])["input_ids"]
    assert post(served, "/v1/completions", **body).json()["usage"]["prompt_tokens"] == len(ids)


def test_tokens_and_back(served: Served) -> None:
    given = post(served, "/tokenize", prompt="Where is it?").json()
    assert given["count"] == len(given["tokens"]) > 2
    assert given["max_model_len"] == 8192
    assert post(served, "/detokenize", tokens=given["tokens"]).json()["prompt"] == "Where is it?"
    prompt = post(served, messages=talk("Ann")).json()["usage"]["prompt_tokens"]
    assert post(served, "/tokenize", messages=talk("Ann")).json()["count"] == prompt
    assert post(served, "/detokenize", tokens=[10**9]).status_code == 400
    assert post(served, "/tokenize").status_code == 400


def test_paths(served: Served) -> None:
    for path in ("/v1/models", "/v1//models", "/v1/models/", f"/v1/models/{MODEL}", "/health", "/"):
        answer = httpx.get(served.url + path)
        assert answer.status_code == 200
        head = httpx.head(served.url + path)
        assert (head.status_code, head.content) == (200, b"")
    assert post(served, "/v1//chat/completions/", messages=HELLO).status_code == 200
    for method, path in (("GET", "/v1/chat"), ("GET", "/v1/chat/completions"), ("POST", "/x")):
        answer = httpx.request(method, served.url + path)
        assert answer.status_code in (404, 405)
        assert "POST /v1/chat/completions" in answer.json()["error"]["message"]
    assert post(served, "/v1/embeddings", input="x").status_code == 501


def test_pages_of_this_machine_may_ask(served: Served) -> None:
    """Browsers ask for leave first; the answer was a 405, and no page could use the server."""
    url = f"{served.url}/v1/chat/completions"
    ask = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,authorization",
    }
    for origin, is_let_in in (
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://evil.example", False),
        ("http://localhost.evil.example", False),
    ):
        answer = httpx.options(url, headers={"Origin": origin, **ask})
        assert ("access-control-allow-origin" in answer.headers) == is_let_in
        assert (answer.status_code == 200) == is_let_in
        models = httpx.get(f"{served.url}/v1/models", headers={"Origin": origin})
        assert models.headers.get("access-control-allow-origin") == (origin if is_let_in else None)
