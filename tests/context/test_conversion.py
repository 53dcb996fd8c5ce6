"""Conversions from and to OpenAI's and LangChain's forms."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from patchkv_agents.context import (
    Message,
    from_langchain,
    from_openai,
    parse_messages,
    render,
    to_langchain,
    to_openai,
)
from patchkv_agents.errors import ContextError

from .samples import agent_messages, argument_objects, json_values, message_lists, names, texts


def dumped(messages: Sequence[BaseMessage]) -> list[str]:
    """All there is in the messages, the order of keys included, but for that of fields."""

    def dump(message: BaseMessage) -> str:
        fields = message.model_dump()
        fields["additional_kwargs"] = dict(sorted(fields["additional_kwargs"].items()))
        return json.dumps([type(message).__name__, dict(sorted(fields.items()))])

    return [dump(message) for message in messages]


# OpenAI's form as its SDKs write it, so that dicts must come back equal.

openai_calls = st.builds(
    lambda call_id, name, arguments: {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    names,
    names,
    argument_objects.map(json.dumps) | texts,
)
legacy_calls = st.builds(
    lambda name, arguments: {"name": name, "arguments": arguments}, names, texts
)
image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
openai_parts = st.lists(
    texts.map(lambda text: {"type": "text", "text": text}) | st.just(image), max_size=3
)
openai_messages = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user"]), "content": texts | openai_parts},
        optional={"name": names},
    ),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": st.none() | texts | openai_parts},
        optional={
            "name": names,
            "refusal": st.none() | texts,
            "reasoning": texts,
            "reasoning_content": texts,
            "reasoning_details": st.lists(json_values, max_size=2),
            "annotations": st.lists(json_values, max_size=2),
            "audio": st.none() | st.fixed_dictionaries({"id": names}),
            "tool_calls": st.lists(openai_calls, min_size=1, max_size=3),
            "usage": st.dictionaries(names, st.integers()),
        },
    ),
    st.fixed_dictionaries(
        {
            "role": st.just("assistant"),
            "content": st.none(),
            "function_call": legacy_calls,
        }
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": texts | openai_parts, "tool_call_id": names}
    ),
    st.fixed_dictionaries({"role": st.just("function"), "content": texts, "name": names}),
)


@given(st.lists(openai_messages, max_size=4))
def test_openai_dicts_come_back_equal(messages: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(messages)
    assert to_openai(from_openai(messages)) == before == messages


@given(message_lists)
def test_any_messages_come_back_from_openai_form(messages: list[dict[str, Any]]) -> None:
    parsed = from_openai(messages)
    assert from_openai(to_openai(parsed)) == parsed


def test_legacy_function_call_is_a_call() -> None:
    function = {"name": "f", "arguments": "{}"}
    legacy, present = from_openai(
        [
            {"role": "assistant", "content": None, "function_call": function},
            {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
        ]
    )
    assert legacy.tool_calls == present.tool_calls
    assert legacy.content_hash == present.content_hash
    assert to_openai([legacy])[0]["function_call"] == function
    with pytest.raises(ContextError, match="Message 0, field 'function_call'.*needs the name"):
        from_openai([{"role": "assistant", "function_call": {"arguments": ""}}])


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content",), None])
def test_names_of_reasoning(names: tuple[str, ...] | None) -> None:
    """Servers use either name, some both; what a caller used comes back."""
    names = names or ("reasoning", "reasoning_content")
    message = {"role": "assistant", "content": "x"} | dict.fromkeys(names, "hm")
    (parsed,) = from_openai([message])
    assert parsed.reasoning == "hm" and to_openai([parsed]) == [message]
    (plain,) = from_openai([{"role": "assistant", "content": "x", "reasoning": "hm"}])
    assert parsed.content_hash == plain.content_hash


def test_metadata_is_neither_content_nor_shown(smollm2_tokenizer: Any) -> None:
    message = {"role": "assistant", "content": "x"}
    more = {
        "usage": {"total": 3},
        "metadata": {"run": "r"},
        "response_metadata": {"model_name": "m"},
        "refusal": None,
        "annotations": [],
    }
    plain, full = from_openai([message, message | more])
    assert plain.content_hash == full.content_hash and plain != full
    assert to_openai([full]) == [message | more]
    tokenizer = copy.deepcopy(smollm2_tokenizer)
    tokenizer.chat_template = "{{ messages[0] | tojson }}"
    assert json.loads(render([full], tokenizer).text) == message
    # GLM-4's templates show a text of that name.
    named = from_openai([message | {"metadata": "tool"}])[0]
    assert named.content_hash != plain.content_hash
    assert '"metadata": "tool"' in render([named], tokenizer).text
    assert full.with_content("y") == from_openai([message | {"content": "y", "refusal": None}])[0]


# LangChain

metadata = st.dictionaries(names, json_values, max_size=2)
blocks = st.one_of(
    texts,
    texts.map(lambda text: {"type": "text", "text": text}),
    st.just(image),
    st.just({"type": "image", "base64": "AAAA", "mime_type": "image/png"}),
    st.fixed_dictionaries({"type": st.just("reasoning"), "reasoning": texts, "extras": metadata}),
    st.fixed_dictionaries({"text": texts}),  # Bedrock's form, without a type
    st.just({"type": "text", "text": None}),
    st.just({"type": "untyped", "value": 1}),
)
contents = texts | st.lists(blocks, max_size=3)
common = {
    "content": contents,
    "name": st.none() | names,
    "id": st.none(),
    "additional_kwargs": metadata,
    "response_metadata": metadata,
}
lc_calls = st.fixed_dictionaries(
    {"name": names, "args": argument_objects, "id": st.none() | names, "type": st.just("tool_call")}
)
lc_invalid = st.fixed_dictionaries(
    {
        "name": st.none() | st.just("") | names,
        "args": st.none() | texts | argument_objects.map(json.dumps),
        "id": st.none() | names,
        "error": st.none() | texts,
        "type": st.just("invalid_tool_call"),
    }
)
usage = st.builds(
    lambda a, b: {"input_tokens": a, "output_tokens": b, "total_tokens": a + b},
    st.integers(0, 9),
    st.integers(0, 9),
)
provider_kwargs = st.fixed_dictionaries(
    {},
    optional={
        "reasoning_content": texts | st.just(3),
        "refusal": st.none() | texts,
        "function_call": legacy_calls,
        "lc_source": st.just("summarization"),
    },
)
langchain_messages = st.one_of(
    st.builds(HumanMessage, **common, mood=json_values, usage=json_values),
    st.builds(SystemMessage, **common),
    st.builds(
        SystemMessage, texts, additional_kwargs=st.just({"__openai_role__": "developer", "a": 1})
    ),
    st.builds(
        AIMessage,
        **(common | {"additional_kwargs": provider_kwargs}),
        tool_calls=st.lists(lc_calls, max_size=2),
        invalid_tool_calls=st.lists(lc_invalid, max_size=2),
        usage_metadata=st.none() | usage,
    ),
    st.builds(
        ToolMessage,
        **common,
        tool_call_id=names,
        artifact=json_values,
        status=st.sampled_from(["success", "error"]),
    ),
    st.builds(FunctionMessage, **(common | {"name": names})),
    st.builds(ChatMessage, **common, role=st.sampled_from(["user", "assistant", "system"])),
)


@settings(max_examples=40)
@given(st.lists(langchain_messages, max_size=3))
def test_langchain_messages_come_back_equal(messages: list[BaseMessage]) -> None:
    before = dumped(messages)
    parsed = from_langchain(messages)
    assert dumped(to_langchain(parsed)) == before == dumped(messages)
    assert from_openai(to_openai(parsed)) == parsed  # so stores keep it too
    shown = from_langchain(messages, keep="shown")
    assert [m.content_hash for m in shown] == [m.content_hash for m in parsed]
    assert all(message.metadata.text == "{}" for message in shown)


@settings(max_examples=40)
@given(message_lists | st.lists(openai_messages, max_size=4))
def test_messages_come_back_from_langchain(messages: list[dict[str, Any]]) -> None:
    parsed = parse_messages(messages)
    again = from_langchain(to_langchain(parsed))
    assert again == parsed
    assert [m.content_hash for m in again] == [m.content_hash for m in parsed]


def test_langchain_sees_what_the_message_says() -> None:
    system, user, call, result, raw, *_ = to_langchain(parse_messages(agent_messages()))
    assert isinstance(system, SystemMessage) and system.content == "You look things up.\n"
    assert isinstance(user, HumanMessage) and user.id == "m1" and not user.additional_kwargs
    assert isinstance(call, AIMessage) and isinstance(raw, AIMessage)
    assert call.content == "" and call.additional_kwargs["reasoning_content"] == "The board knows."
    args = {"stop": "Quay", "at": [9, 40]}
    assert call.tool_calls == [{"name": "board", "args": args, "id": "c1", "type": "tool_call"}]
    assert raw.tool_calls[0]["args"] == {"zoom": 2}
    assert isinstance(result, ToolMessage) and result.tool_call_id == "c1"


# Takes objects only, as far as one sees by trying; a text is shown as it is.
OBJECT_ARGUMENTS = """\
{%- for m in messages %}<|im_start|>{{ m.content }}{% for c in m.tool_calls or [] %}
{{- c.function.arguments if c.function.arguments is string and 'probe' not in c.function.name
    else dict(c.function.arguments) | tojson }}{% endfor %}{% endfor %}"""
ODD_ARGUMENTS = ['{"a": NaN}', r'{"a": "\ud800"}', "[1]", "", "{", '{"a": ' + "[" * 3000, '"x"']


@pytest.mark.parametrize("arguments", ODD_ARGUMENTS)
def test_arguments_which_only_python_reads(arguments: str, smollm2_tokenizer: Any) -> None:
    """A model may write NaN or half a surrogate pair; both used to break what came after."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    parsed = from_openai([{"role": "assistant", "content": None, "tool_calls": [call]}])
    (made,) = to_langchain(parsed)
    assert isinstance(made, AIMessage) and made.invalid_tool_calls[0]["args"] == arguments
    assert from_langchain([made]) == parsed
    tokenizer = copy.deepcopy(smollm2_tokenizer)
    tokenizer.chat_template = OBJECT_ARGUMENTS
    shown = render(parsed, tokenizer).text.removeprefix("<|im_start|>")
    assert json.loads(shown) == ({"arguments": arguments} if arguments else {})


def test_what_was_changed_in_langchain_stays_changed() -> None:
    """What we keep beside a message must not undo an edit made with LangChain's means."""
    parsed = parse_messages(agent_messages())
    raw = to_langchain(parsed)[4]
    assert isinstance(raw, AIMessage)
    raw.tool_calls[0]["args"]["zoom"] = 3
    raw.content = "No map."
    (back,) = from_langchain([raw])
    assert back.content == "No map." and back.tool_calls[0].arguments == {"zoom": 3}
    untouched = to_langchain(parsed)[4]
    untouched.content = "No map."
    (back,) = from_langchain([untouched])
    assert back.content == "No map." and back.tool_calls[0].arguments == '{"zoom":  2}'


def test_what_the_model_is_not_shown_is_no_edit() -> None:
    one = AIMessage("x", response_metadata={"model_name": "a"}, id="run-1")
    two = AIMessage(
        "x",
        usage_metadata={"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
        additional_kwargs={"lc_source": "summarization"},
    )
    three = ToolMessage("x", tool_call_id="a", artifact={"rows": [1]})
    four = ToolMessage("x", tool_call_id="b", status="error")
    hashes = [message.content_hash for message in from_langchain([one, two, three, four])]
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3]


def test_artifacts_that_are_not_json() -> None:
    message = ToolMessage("x", tool_call_id="a", artifact={"frame": object()})
    problem = r"Message 1.langchain.artifact.frame: object is not JSON.*keep='shown'"
    with pytest.raises(ContextError, match=problem):
        from_langchain([HumanMessage("q"), message])
    assert from_langchain([message], keep="shown")[0].content == "x"


def test_chunks_become_messages() -> None:
    chunk = AIMessageChunk(
        "", tool_call_chunks=[{"name": "f", "args": "{}", "id": "c", "index": 0}]
    )
    (parsed,) = from_langchain([chunk])
    assert parsed.tool_calls[0].name == "f"
    assert isinstance(to_langchain([parsed])[0], AIMessage)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("x", "must be a list"),
        ([HumanMessage("a"), "x"], "Message 1: must be a LangChain message, not str.*convert_to"),
        ([RemoveMessage("a")], "Message 0: a RemoveMessage .*apply it first"),
        ([ChatMessage("x", role="critic")], "Message 0, field 'role': is 'critic'"),
        ([HumanMessage("a\ud800")], "Message 0, field 'content': lone surrogate"),
        ([HumanMessage([{"type": "image", "bytes": b"x"}])], r"'content'\[0\].bytes: bytes is not"),
        (
            [AIMessage("", tool_calls=[{"name": "f", "args": {"a": float("nan")}, "id": "c"}])],
            r"Message 0, field 'tool_calls\[0\]'.arguments.a: nan",
        ),
    ],
)
def test_what_cannot_be_converted_is_named(messages: Any, problem: str) -> None:
    with pytest.raises(ContextError, match=problem):
        from_langchain(messages)


def test_reasoning_and_calls_in_blocks_are_rendered_once(smollm2_tokenizer: Any) -> None:
    """As content of LangChain's output version v1, which repeats the calls."""
    call = {"type": "tool_call", "id": "c", "name": "board", "args": {"stop": "Quay"}}
    blocks: list[Any] = [
        {"type": "reasoning", "reasoning": "The board knows."},
        {"type": "text", "text": "I look."},
        call,
    ]
    message = AIMessage(blocks, tool_calls=[call])
    plain = Message(
        "assistant",
        "I look.",
        reasoning="The board knows.",
        tool_calls=from_langchain([message])[0].tool_calls,
    )
    rendered = render(from_langchain([message]), smollm2_tokenizer)
    assert rendered.verified and rendered.text == render([plain], smollm2_tokenizer).text
    bare = from_langchain([AIMessage([call])])
    with pytest.raises(ContextError, match=r"Message 0, field 'content\[0\]'.*'tool_call'"):
        render([bare[0].with_content(bare[0].content)], smollm2_tokenizer)
