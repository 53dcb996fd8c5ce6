"""Anthropic's Messages API, through the official client and its types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaMessageTokensCount
from pydantic import TypeAdapter

from patchkv_agents.engine import Engine, Thread
from patchkv_agents.recovery import RecoveryPolicy

from .conftest import NewEngine
from .serving import MODEL, Served, serving

RULES = "You look things up in a depot, and answer briefly. " * 12
TOOLS: list[Any] = [
    {
        "name": "find",
        "description": "Finds an item.",
        "input_schema": {"type": "object", "properties": {"item": {"type": "string"}}},
    }
]
HELLO: list[Any] = [{"role": "user", "content": "Where is the lamp?"}]
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def served(new_engine: NewEngine) -> Iterator[Served]:
    with serving(new_engine(RecoveryPolicy.default()), keys=["secret-key-1"]) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=served.url, api_key="secret-key-1", max_retries=0, timeout=60
    ) as client:
        yield client


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


def ask(client: anthropic.Anthropic, messages: Any = None, **options: Any) -> Any:
    options = {"model": MODEL, "max_tokens": 8, **options}
    return client.messages.create(messages=messages or HELLO, **options)


def episode(calls: int) -> list[dict[str, Any]]:
    """A conversation in which a tool was called so often, with long results."""
    messages = list(HELLO)
    for n in range(calls):
        use = {"type": "tool_use", "id": f"toolu_{n}", "name": "find", "input": {"item": f"{n}"}}
        found = {"type": "tool_result", "tool_use_id": f"toolu_{n}"}
        found["content"] = f"Item {n} is on shelf {n * 7}. " * 20
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": f"Step {n}."}, use]},
            {"role": "user", "content": [found]},
        ]
    return messages


def test_an_answer_equals_that_of_chat_completions(
    served: Served, client: anthropic.Anthropic
) -> None:
    answer = ask(client, system=RULES)
    Message.model_validate(answer.model_dump(), strict=False)
    chat = served.client("secret-key-1").chat.completions.create(
        model=MODEL, messages=[{"role": "system", "content": RULES}, *HELLO], max_tokens=8
    )
    assert answer.content[0].text == chat.choices[0].message.content
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == (
        chat.usage and chat.usage.prompt_tokens
    )
    assert client.models.list().data[0].id == MODEL


def test_events_of_a_stream(served: Served, client: anthropic.Anthropic, says: Any) -> None:
    call = '<tool_call>\n{"name": "find", "arguments": {"item": "lamp"}}\n</tool_call>'
    says(served.engine, f"<think>\nThe depot knows.\n</think>\nI look. {call}\n{call}")
    body = {"model": MODEL, "max_tokens": 99, "messages": HELLO, "tools": TOOLS, "stream": True}
    headers = {"x-api-key": "secret-key-1"}
    lines = httpx.post(f"{served.url}/v1/messages", json=body, headers=headers).text.splitlines()
    events = [
        EVENTS.validate_python(json.loads(line.removeprefix("data: ")))
        for line in lines
        if line.startswith("data: ")
    ]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names == [event.type for event in events]
    starts = [event.content_block for event in events if event.type == "content_block_start"]
    assert [block.type for block in starts] == ["thinking", "text", "tool_use", "tool_use"]
    stops = [event.index for event in events if event.type == "content_block_stop"]
    assert stops == [0, 1, 2, 3]
    with client.messages.stream(model=MODEL, max_tokens=99, messages=HELLO, tools=TOOLS) as stream:
        message = stream.get_final_message()
    whole = ask(client, tools=TOOLS, max_tokens=99)
    for answer in (message, whole):
        thinking, text, use, other = answer.content
        assert (thinking.thinking, text.text) == ("The depot knows.", "I look.")
        assert (use.name, use.input) == ("find", {"item": "lamp"})
        assert use.id != other.id
        assert answer.stop_reason == "tool_use"
    assert message.usage.output_tokens == whole.usage.output_tokens
    one = ask(
        client,
        tools=TOOLS,
        max_tokens=99,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert [block.type for block in one.content] == ["thinking", "text", "tool_use"]


def test_stop_sequences(served: Served, client: anthropic.Anthropic, says: Any) -> None:
    says(served.engine, "One, two, three.")
    answer = ask(client, stop_sequences=["three", "two"], max_tokens=20)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "two")
    assert answer.content[0].text == "One, "
    assert ask(client, max_tokens=20).stop_reason == "end_turn"


def test_a_conversation_with_tools_and_moving_marks_is_one(client: anthropic.Anthropic) -> None:
    """`cache_control` moves with each request, and an attribution header is another each time."""

    def marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        content = messages[-1]["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        mark = {"cache_control": {"type": "ephemeral"}}
        return [*messages[:-1], {**messages[-1], "content": [*blocks[:-1], blocks[-1] | mark]}]

    def system(number: int) -> Any:
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={number:05x};"
        return [{"type": "text", "text": header}, {"type": "text", "text": RULES}]

    answers = [
        ask(client, marked(episode(calls)), system=system(calls), tools=TOOLS) for calls in (1, 2)
    ]
    first, second = answers
    assert second.recovery["thread"] == first.recovery["thread"]
    assert {edit["kind"] for edit in second.recovery["edits"]} == {"append"}
    tokens = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert second.usage.cache_read_input_tokens >= tokens - 8


def test_rows_that_were_restored_are_not_read_from_the_cache(client: anthropic.Anthropic) -> None:
    old = episode(6)
    new = [*old[:2], {"role": "user", "content": "It is on shelf 9 now."}, *old[3:]]
    ask(client, old, system=f"A. {RULES}")
    answer = ask(client, new, system=f"A. {RULES}")
    assert answer.recovery["restored"] > 100
    assert answer.usage.cache_read_input_tokens == answer.recovery["cache_read"]


def test_tool_uses_are_cleared_once_and_stay_so(
    served: Served, client: anthropic.Anthropic
) -> None:
    """The client sends the uncleared history again, and is told each time what is left out."""
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 4},
        "keep": {"type": "tool_uses", "value": 2},
    }

    def turn(calls: int, **more: Any) -> Any:
        answer = client.beta.messages.create(
            model=MODEL,
            max_tokens=4,
            system=f"B. {RULES}",
            messages=episode(calls),  # type: ignore[arg-type]
            tools=TOOLS,
            context_management={"edits": [{**edit, **more}]},  # type: ignore[typeddict-item]
            betas=["context-management-2025-06-27"],
        )
        return BetaMessage.model_validate(answer.model_dump())

    assert turn(4).context_management.applied_edits == []
    fifth, sixth = turn(5), turn(6)
    (applied,) = fifth.context_management.applied_edits
    assert (applied.type, applied.cleared_tool_uses) == (edit["type"], 3)
    assert applied.cleared_input_tokens > 300
    recovery: Any = fifth.model_extra["recovery"]  # type: ignore[index]
    assert recovery["restored"] > 0 and "append" in {e["kind"] for e in recovery["edits"]}
    assert sixth.context_management.applied_edits[0].cleared_tool_uses == 3  # the same ones
    edits = sixth.model_extra["recovery"]["edits"]  # type: ignore[index]
    assert {e["kind"] for e in edits} == {"append"}
    counted = client.beta.messages.count_tokens(
        model=MODEL,
        system=f"B. {RULES}",
        messages=episode(6),  # type: ignore[arg-type]
        tools=TOOLS,
        context_management={"edits": [edit]},  # type: ignore[typeddict-item]
    )
    BetaMessageTokensCount.model_validate(counted.model_dump())
    usage = sixth.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    original = counted.context_management.original_input_tokens  # type: ignore[union-attr]
    cleared = sixth.context_management.applied_edits[0].cleared_input_tokens
    assert original == counted.input_tokens + cleared


def test_clearing_as_it_is_asked_for(client: anthropic.Anthropic) -> None:
    def tokens(edit: dict[str, Any], name: str) -> Any:
        return client.beta.messages.count_tokens(
            model=MODEL,
            system=name,
            messages=[{"role": "user", "content": "Another question."}, *episode(5)[1:]],
            tools=TOOLS,
            context_management={"edits": [edit]},  # type: ignore[typeddict-item]
        )

    many = {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 400}}
    for more in (
        {"exclude_tools": ["find"]},
        {"clear_at_least": {"type": "input_tokens", "value": 10**6}},
        {"trigger": {"type": "input_tokens", "value": 10**6}},
        {"keep": {"type": "tool_uses", "value": 5}},
    ):
        counted = tokens({**many, **more}, "C")
        assert counted.input_tokens == counted.context_management.original_input_tokens
    counted = tokens(many, "C")
    assert counted.input_tokens < counted.context_management.original_input_tokens
    never = {**many, "trigger": {"type": "input_tokens", "value": 10**6}}
    again = tokens(never, "C")  # counting leaves nothing behind
    assert again.input_tokens == counted.context_management.original_input_tokens
    thought = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Long thought. " * 30, "signature": ""},
                {"type": "text", "text": "On shelf 3."},
            ],
        },
    ]
    clear = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
    answer = client.beta.messages.create(
        model=MODEL,
        max_tokens=2,
        messages=[*thought, *thought, *HELLO],  # type: ignore[arg-type]
        context_management={"edits": [clear]},  # type: ignore[typeddict-item, list-item]
    )
    (applied,) = answer.context_management.applied_edits  # type: ignore[union-attr]
    assert applied.cleared_thinking_turns == 1  # type: ignore[union-attr]
    with pytest.raises(anthropic.BadRequestError, match="compact_9 is not known|'compact_9'"):
        tokens({"type": "compact_9"}, "C")


def test_count_tokens(served: Served, client: anthropic.Anthropic) -> None:
    before = served.service.places()
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system=f"D. {RULES}")
    assert served.service.places() == before
    usage = ask(client, system=f"D. {RULES}").usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_blocks_of_all_kinds(client: anthropic.Anthropic) -> None:
    picture = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "text", "text": "So:"}, {"type": "image", "source": picture}],
    }
    document = {"type": "document", "source": {"type": "text", "data": "Rules.", "media_type": "x"}}
    messages = [
        {"role": "user", "content": [document, {"type": "text", "text": "Look."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "text", "text": "Well?"}, result]},
    ]
    answer = ask(client, messages, tools=TOOLS)
    assert answer.recovery["notes"] == ["message 2: a part of type 'image' in a result is left out"]
    with pytest.raises(anthropic.BadRequestError, match="'image' cannot be rendered"):
        ask(client, [{"role": "user", "content": [{"type": "image", "source": picture}]}])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model": "gpt-9"}, "no such model"),
        ({"max_tokens": 0}, "max_new_tokens is 0"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "runs on Anthropic's"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"extra_body": {"output_config": {"format": {"type": "json_schema"}}}}, "not supported"),
        ({"messages": [{"role": "user", "content": "many words " * 9000}]}, "prompt is too long"),
        ({"messages": [{"role": "critic", "content": "x"}]}, r"messages\[0\].role"),
        (
            {"extra_body": {"messages": [{"role": "user", "content": [5]}]}},
            r"messages\[0\].content",
        ),
    ],
)
def test_wrong_requests(client: anthropic.Anthropic, options: Any, problem: str) -> None:
    with pytest.raises(anthropic.APIStatusError, match=problem) as caught:
        ask(client, **options)
    assert caught.value.status_code in (400, 404)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] in ("invalid_request_error", "not_found_error")


def test_models_by_their_aliases_and_wrong_keys(
    served: Served, client: anthropic.Anthropic
) -> None:
    assert ask(client, model="claude-haiku-9").model == "claude-haiku-9"
    with anthropic.Anthropic(base_url=served.url, api_key="wrong-key-99", max_retries=0) as other:
        with pytest.raises(anthropic.AuthenticationError):
            ask(other)
    assert httpx.head(served.url).status_code == 200


def test_an_error_in_a_stream(client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *args: Any, **options: Any) -> Any:
        def chunks() -> Iterator[Any]:
            raise RuntimeError("lamp")
            yield

        return chunks()

    monkeypatch.setattr(Thread, "stream", fail)
    with pytest.raises(anthropic.APIStatusError, match="its log says where") as caught:
        with client.messages.stream(model=MODEL, max_tokens=9, messages=HELLO) as stream:
            stream.get_final_message()
    assert "lamp" not in str(caught.value)
