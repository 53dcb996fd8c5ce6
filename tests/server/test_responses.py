"""OpenAI's Responses API, through the official client and its types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from patchkv_agents.engine import Engine, Thread
from patchkv_server.responses_api import KEPT_S, KeptResponses

from .conftest import NewEngine
from .serving import MODEL, Served, serving

RULES = "You look things up in a depot, and answer briefly. " * 12
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "find",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
    {"type": "custom", "name": "patch", "description": "Applies a patch."},
]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def served(new_engine: NewEngine) -> Iterator[Served]:
    keys = ["ann:secret-key-1", "bob:secret-key-2"]
    with serving(new_engine(), keys=keys) as served:
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


def ask(served: Served, given: Any = "Where is the lamp?", key: str = "secret-key-1", **more: Any):
    options = {"model": MODEL, "max_output_tokens": 8, **more}
    return served.client(key).responses.create(input=given, **options)


def test_an_answer_equals_that_of_chat_completions(served: Served) -> None:
    response = ask(served, instructions=RULES)
    Response.model_validate(response.model_dump(), strict=False)
    messages: Any = [
        {"role": "system", "content": RULES},
        {"role": "user", "content": "Where is the lamp?"},
    ]
    chat = served.client("secret-key-1").chat.completions.create(
        model=MODEL, messages=messages, max_tokens=8
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == (chat.usage and chat.usage.prompt_tokens)
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )


def test_events_of_a_stream(served: Served, says: Any) -> None:
    call = '<tool_call>\n{"name": "find", "arguments": {"item": "lamp"}}\n</tool_call>'
    patch = '<tool_call>\n{"name": "patch", "arguments": {"input": "- a\\n+ b"}}\n</tool_call>'
    says(served.engine, f"<think>\nThe depot knows.\n</think>\nI look. {call}\n{patch}")
    body = {"model": MODEL, "input": "Well?", "tools": TOOLS, "stream": True}
    headers = {"Authorization": "Bearer secret-key-1"}
    lines = httpx.post(f"{served.url}/v1/responses", json=body, headers=headers).text.splitlines()
    raw = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    events = [EVENTS.validate_python(event) for event in raw]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    items = [event.item for event in events if event.type == "response.output_item.done"]
    whole = ask(served, "Well?", tools=TOOLS, max_output_tokens=99)
    for output in (items, events[-1].response.output, whole.output):
        reasoning, message, found, patched = output
        assert reasoning.content[0].text == "The depot knows."
        assert message.content[0].text == "I look."
        assert (found.type, json.loads(found.arguments)) == ("function_call", {"item": "lamp"})
        assert (patched.type, patched.input) == ("custom_tool_call", "- a\n+ b")
    with served.client("secret-key-1").responses.stream(
        model=MODEL, input="Well?", tools=TOOLS
    ) as stream:
        stream.until_done()
        assert stream.get_final_response().output_text == "I look."
    one = ask(served, "Well?", tools=TOOLS, max_output_tokens=99, parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["reasoning", "message", "function_call"]


def test_namespaces_and_tools_of_openais_servers(served: Served, says: Any) -> None:
    call = '<tool_call>\n{"name": "depot__find", "arguments": {"item": "lamp"}}\n</tool_call>'
    says(served.engine, call)
    namespace = {"type": "namespace", "name": "depot", "description": "", "tools": TOOLS}
    tools = [namespace, {"type": "web_search"}]
    response = ask(served, "Find it.", tools=tools, max_output_tokens=99)
    (found,) = response.output
    assert (found.name, found.namespace) == ("find", "depot")
    assert response.recovery["notes"] == [
        "tool 1 of type 'web_search' is left out: this server does not run it"
    ]
    output = {"type": "function_call_output", "call_id": found.call_id, "output": "Shelf 9."}
    question = {"role": "user", "content": "Find it."}
    items = [question, found.model_dump(exclude_none=True), output]
    second = ask(served, items, tools=tools, max_output_tokens=2)
    assert second.recovery["thread"] == response.recovery["thread"]
    assert {edit["kind"] for edit in second.recovery["edits"]} == {"append"}


def test_a_whole_conversation_that_is_sent_again(served: Served, says: Any) -> None:
    """What the API hands out comes back as items, and is the same message as before."""
    call = '<tool_call>\n{"name": "find", "arguments": {"item": "lamp"}}\n</tool_call>'
    says(served.engine, f"I look. {call}")
    question = {"role": "user", "content": [{"type": "input_text", "text": "Where is it? " * 30}]}
    first = ask(served, [question], tools=TOOLS, max_output_tokens=99, store=False)
    (found,) = [item for item in first.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": found.call_id, "output": "Shelf 9."}
    items = [question, *(item.model_dump(exclude_none=True) for item in first.output), output]
    second = ask(served, items, tools=TOOLS, max_output_tokens=99)
    assert second.recovery["thread"] == first.recovery["thread"]
    assert {edit["kind"] for edit in second.recovery["edits"]} == {"append"}
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.input_tokens


def test_going_on_from_a_response(served: Served) -> None:
    first = ask(served, f"A. {RULES}", instructions="Be brief.")
    second = ask(served, "And the rug?", previous_response_id=first.id, instructions="Be brief.")
    assert second.recovery["thread"] == first.recovery["thread"]
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert second.previous_response_id == first.id
    branch = ask(served, "And the cup?", previous_response_id=first.id, instructions="Be brief.")
    assert branch.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    client = served.client("secret-key-1")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    for key, response_id in (("secret-key-2", first.id), ("secret-key-1", "resp_1")):
        with pytest.raises(openai.NotFoundError):
            served.client(key).responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError) as caught:
            ask(served, "And?", key, previous_response_id=response_id)
        assert caught.value.param == "previous_response_id"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_what_is_not_to_be_stored_is_not(served: Served) -> None:
    response = ask(served, "B.", store=False)
    with pytest.raises(openai.NotFoundError):
        served.client("secret-key-1").responses.retrieve(response.id)


def test_responses_expire() -> None:
    now = [0.0]
    kept = KeptResponses(lambda: now[0])
    kept.keep({"id": "resp_1"}, tenant="ann", thread="t", messages=())
    now[0] = KEPT_S - 1
    assert kept.get("resp_1", "ann").thread == "t"
    now[0] = KEPT_S
    with pytest.raises(Exception, match="has expired"):
        kept.get("resp_1", "ann")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tool_choice": "find"}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"max_output_tokens": -5}, "max_output_tokens"),
        ({"given": ""}, "input"),
        ({"given": [{"type": "computer_call"}]}, "input[0].type"),
    ],
)
def test_wrong_requests(served: Served, options: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(served, **options)
    assert caught.value.param == field
