"""The API, through the official client and a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from patchkv_agents.engine import Engine, Thread
from patchkv_agents.errors import InputError
from patchkv_server import ApiKeys, ServerSettings

from .conftest import NewEngine
from .serving import MODEL, Served, serving, talk, until

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Finds an item.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def served(new_engine: NewEngine) -> Iterator[Served]:
    with serving(new_engine(), ServerSettings(max_body_bytes=50_000)) as served:
        yield served


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the model say a text, whose rows the engine computes as always."""

    def script(engine: Engine, text: str) -> None:
        stream = Thread.stream
        ids = engine.tokenizer.encode(text, add_special_tokens=False)
        begin = (*ids, engine.tokenizer.eos_token_id)

        def scripted(self: Thread, *args: Any, **options: Any) -> Any:
            return stream(self, *args, **{**options, "begin": begin})

        monkeypatch.setattr(Thread, "stream", scripted)

    return script


def ask(served: Served, messages: Any = None, **options: Any) -> Any:
    client = served.client()
    options = {"model": MODEL, "max_tokens": 8, "temperature": 0, **options}
    return client.chat.completions.create(messages=messages or talk("Ann"), **options)


def test_equals_the_engine(served: Served, new_engine: NewEngine) -> None:
    messages = talk("Zoe", system="You are new here.")
    expected = new_engine().thread("t").generate(messages, max_new_tokens=8)
    reply = ask(served, messages)
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].finish_reason == expected.finish_reason
    assert reply.usage.prompt_tokens == expected.report.tokens
    assert reply.usage.completion_tokens == len(expected.token_ids)
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


def test_sampling_options_arrive(served: Served, new_engine: NewEngine) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "seed": 11}
    expected = (
        new_engine()
        .thread("t")
        .generate(talk("Ann"), max_new_tokens=12, top_k=50, repetition_penalty=1.3, **options)
    )
    body = {"top_k": 50, "repetition_penalty": 1.3}
    reply = ask(served, max_tokens=12, extra_body=body, **options)
    assert reply.choices[0].message.content == expected.text
    stop = expected.text[4:8]
    reply = ask(served, max_completion_tokens=12, stop=stop, extra_body=body, **options)
    assert reply.choices[0].message.content == expected.text.partition(stop)[0]
    assert reply.choices[0].finish_reason == "stop"


def test_streams(served: Served) -> None:
    whole = ask(served)
    chunks = list(ask(served, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    # Asked again, all of the prompt but the last token is there.
    cached = chunks[-1].usage.prompt_tokens_details.cached_tokens
    assert cached == chunks[-1].recovery["cache_read"] == whole.usage.prompt_tokens - 1
    assert chunks[-1].recovery["thread"] == whole.recovery["thread"]


def test_report_in_last_chunk_without_usage(served: Served) -> None:
    chunks = list(ask(served, stream=True))
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason is not None
    assert chunks[-1].recovery["policy"] == "exact"


def test_logprobs(served: Served) -> None:
    whole = ask(served, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(whole) == 8
    assert all(token.top_logprobs[0].logprob == token.logprob for token in whole)  # it is greedy
    assert len(whole[0].top_logprobs) == 2
    chunks = list(ask(served, logprobs=True, top_logprobs=2, stream=True))
    pieces = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    streamed = [token for piece in pieces for token in piece.content]
    assert [token.token for token in streamed] == [token.token for token in whole]


def test_tool_calls(served: Served, says: Any) -> None:
    call = '<tool_call>\n{"name": "find", "arguments": {"item": "lamp"}}\n</tool_call>'
    says(served.engine, f"I look. {call}\n{call.replace('lamp', 'rug')}")
    whole = ask(served, tools=TOOLS, max_tokens=100).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "I look."
    calls = whole.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [
        {"item": "lamp"},
        {"item": "rug"},
    ]
    assert calls[0].id != calls[1].id
    chunks = list(ask(served, tools=TOOLS, max_tokens=100, stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(delta.index, delta.id) for delta in deltas] == [(0, calls[0].id), (1, calls[1].id)]
    assert [delta.function.arguments for delta in deltas] == [
        call.function.arguments for call in calls
    ]
    one = ask(served, tools=TOOLS, max_tokens=100, parallel_tool_calls=False).choices[0]
    assert [call.id for call in one.message.tool_calls] == [calls[0].id]
    none = ask(served, tools=TOOLS, max_tokens=100, tool_choice="none").choices[0]
    assert none.message.tool_calls is None
    assert "<tool_call>" in none.message.content


def test_forced_call_begins_as_one(served: Served, new_engine: NewEngine) -> None:
    choice = {"type": "function", "function": {"name": "find"}}
    reply = ask(served, tools=TOOLS, tool_choice=choice, max_tokens=24)
    assert '"name": "find"' in reply.choices[0].message.content  # random weights do not finish it


def test_tool_results_go_back(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    messages = [
        *talk("Ann", 2),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "On shelf 9."},
    ]
    assert ask(served, messages, tools=TOOLS).usage.prompt_tokens > 0


def test_asynchronous_clients_at_once(served: Served) -> None:
    async def all_of() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        async with client:
            asked = [
                client.chat.completions.create(
                    model=MODEL, messages=talk(name), max_tokens=8, temperature=0
                )  # type: ignore[call-overload]
                for name in ("Ann", "Bob", "Cleo")
            ]
            return list(await asyncio.gather(*asked))

    replies = asyncio.run(all_of())
    for name, reply in zip(("Ann", "Bob", "Cleo"), replies, strict=True):
        assert (
            reply.choices[0].message.content == ask(served, talk(name)).choices[0].message.content
        )


def test_an_asynchronous_stream_that_is_given_up(served: Served) -> None:
    async def give_up() -> None:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        async with client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=talk("Eve"), max_tokens=4000, stream=True
            )  # type: ignore[call-overload]
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(give_up())
    until(lambda: served.service.queue().running == 0)
    assert ask(served, talk("Eve")).usage.prompt_tokens_details.cached_tokens > 0


def test_models_and_health(served: Served) -> None:
    client = served.client()
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    assert httpx.get(f"{served.url}/health").json()["status"] == "ok"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 99}, "logprobs"),
        ({"tool_choice": "find"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"extra_body": {"repetition_penalty": 1e-300}}, "repetition_penalty"),
        ({"extra_body": {"repetition_penalty": 1e300}}, "repetition_penalty"),
        ({"extra_body": {"thread": 5}}, "thread"),
        ({"extra_body": {"stream": "yes"}}, "stream"),
    ],
)
def test_wrong_requests(served: Served, options: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(served, **options)
    assert caught.value.param == field
    assert caught.value.type == "invalid_request_error"


def test_harmless_fields_are_ignored(served: Served) -> None:
    ask(served, extra_body={"new_field": 1, "store": False, "prompt_cache_key": "k", "n": 1})


def test_images_are_refused(served: Served) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match="only text can"):
        ask(served, [{"role": "user", "content": [picture]}])


def test_unknown_model(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(served, model="gpt-9")
    assert caught.value.code == "model_not_found"


def test_too_long(served: Served) -> None:
    messages = [{"role": "user", "content": "so many words " * 3000}]
    before = served.service.places()
    with pytest.raises(openai.BadRequestError) as caught:
        ask(served, messages)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        list(ask(served, messages, stream=True))
    assert served.service.places().keys() == before.keys()  # nothing is kept of it


def test_body_too_large(served: Served) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(served, [{"role": "user", "content": "x" * 60_000}])
    assert caught.value.status_code == 413

    def pieces() -> Iterator[bytes]:
        for _ in range(60):
            yield b"x" * 1000

    headers = {"Content-Type": "application/json"}
    url = f"{served.url}/v1/chat/completions"
    assert httpx.post(url, content=pieces(), headers=headers).status_code == 413


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"model": "tiny"}', b'{"model": "tiny", "messages": [5]}', b"\xff"]
)
def test_malformed_bodies(served: Served, body: bytes) -> None:
    url, headers = f"{served.url}/v1/chat/completions", {"Content-Type": "application/json"}
    answer = httpx.post(url, content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_web_pages_cannot_use_it(served: Served) -> None:
    """A page may send text without asking, or bind its own name to this machine's address."""
    url = f"{served.url}/v1/chat/completions"
    assert httpx.post(url, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
    for host in ("evil.example", "["):
        answer = httpx.get(f"{served.url}/v1/models", headers={"Host": host})
        assert answer.status_code == 403
    for origin, status in (
        ("http://evil.example", 403),
        ("https://127.0.0.1.evil.example:8080", 403),
        ("http://localhost:3000", 200),
        ("app://a-desktop-program", 200),
    ):
        answer = httpx.get(f"{served.url}/v1/models", headers={"Origin": origin})
        assert answer.status_code == status


def test_keys(new_engine: NewEngine) -> None:
    with serving(new_engine(), keys=["ann:secret-key-1", "secret-key-2"]) as served:
        options: Any = {"model": MODEL, "messages": talk("Ann"), "max_tokens": 2}
        for wrong in ("wrong", "ann:secret-key-1", "secret-key-10"):
            with pytest.raises(openai.AuthenticationError) as caught:
                served.client(wrong).chat.completions.create(**options)
            assert caught.value.code == "invalid_api_key"
        assert httpx.get(f"{served.url}/metrics").status_code == 401
        assert httpx.get(f"{served.url}/health").status_code == 200
        assert served.client("secret-key-1").chat.completions.create(**options).choices


@pytest.mark.parametrize("key", ["ann:two:secret-key-1", "secret-kéy-1", "secret key 1"])
def test_keys_that_no_request_could_send(key: str) -> None:
    with pytest.raises(InputError, match="an API key has"):
        ApiKeys([key])
