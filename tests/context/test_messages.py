from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given

from patchkv_agents.context import ToolCall, load_conversation, parse_messages, parse_tools
from patchkv_agents.errors import ContextError, InputError

from .samples import agent_messages, message_lists


@given(message_lists)
def test_round_trip_through_openai_form(messages: list[dict]) -> None:
    before = copy.deepcopy(messages)
    parsed = parse_messages(messages)
    assert messages == before
    emitted = [message.to_openai() for message in parsed]
    again = parse_messages(emitted)
    assert again == parsed
    assert [m.content_hash for m in again] == [m.content_hash for m in parsed]
    for given_message, out in zip(messages, emitted, strict=True):
        for key in given_message.keys() - {"tool_calls"}:
            assert out[key] == given_message[key]


def test_both_forms_of_calls_are_the_same_message() -> None:
    flat = {"id": "c", "name": "f", "args": {"b": 1, "a": [None, 2.5]}}
    nested = {"id": "c", "type": "function", "function": {"name": "f", "arguments": flat["args"]}}
    one, two = (
        parse_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
        for call in (flat, nested)
    )
    assert one == two
    assert one[0].tool_calls[0].to_openai() == nested


def test_what_was_passed_in_can_be_changed_afterwards() -> None:
    messages = agent_messages()
    parsed = parse_messages(messages)
    expected = [message.to_openai() for message in parsed]
    messages[2]["tool_calls"][0]["args"]["stop"] = "Harbour"
    messages[2]["tool_calls"][0]["args"]["at"].append(0)
    parsed[2].to_openai()["tool_calls"][0]["function"]["arguments"]["stop"] = "Harbour"
    assert [message.to_openai() for message in parsed] == expected


def test_key_order_of_arguments_counts_in_equality_and_hash() -> None:
    def message(arguments: object) -> object:
        return parse_messages(
            [{"role": "assistant", "tool_calls": [{"name": "f", "args": arguments}]}]
        )[0]

    forms = [{"a": 1, "b": 2}, {"b": 2, "a": 1}, '{"a": 1, "b": 2}', '{"a":1,"b":2}']
    assert len({message(form) for form in forms}) == 4
    assert len({message(form).content_hash for form in forms}) == 4
    assert list(message(forms[1]).tool_calls[0].arguments) == ["b", "a"]
    assert message(forms[3]).tool_calls[0].arguments == '{"a":1,"b":2}'


def test_ids_do_not_count_in_the_hash_but_in_equality() -> None:
    base = agent_messages()[2]
    other = copy.deepcopy(base) | {"id": "another"}
    other["tool_calls"][0]["id"] = "call_9"
    one, two = parse_messages([base, other])
    assert one.content_hash == two.content_hash
    assert one != two


@pytest.mark.parametrize(
    "change",
    [
        {"role": "user", "tool_calls": None},
        {"content": "x"},
        {"name": "n"},
        {"reasoning": "r"},
        {"weather": "fair"},
        {"tool_calls": [{"name": "g", "args": {}}]},
    ],
)
def test_everything_else_counts_in_the_hash(change: dict) -> None:
    base = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "args": {}}]}
    one, two = parse_messages([base, base | change])
    assert one.content_hash != two.content_hash


def test_unknown_fields_are_kept() -> None:
    message = {
        "role": "assistant",
        "content": "x",
        "sources": [{"url": "u"}],
        "tool_calls": [
            {
                "id": "c",
                "type": "function",
                "index": 0,
                "function": {"name": "f", "arguments": "{}", "signature": "s"},
            }
        ],
    }
    (parsed,) = parse_messages([message])
    assert parsed.extra.load() == {"sources": [{"url": "u"}]}
    assert parsed.to_openai() == message


def test_reasoning_content_is_reasoning() -> None:
    (parsed,) = parse_messages([{"role": "assistant", "content": "", "reasoning_content": "hm"}])
    assert parsed.reasoning == "hm"


def test_text_of_parts_leaves_images_out() -> None:
    content = [
        "a",
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "text", "text": "b"},
    ]
    (parsed,) = parse_messages([{"role": "user", "content": content}])
    assert parsed.text == "a\nb"


def test_results_without_calls_and_shared_ids_of_calls_are_fine() -> None:
    """Contexts are cut and cleared, and many models number their calls anew each turn."""
    call = {"id": "call_0", "name": "f", "args": {}}
    messages = [
        {"role": "tool", "tool_call_id": "gone", "content": "4"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert [m.to_openai()["role"] for m in parse_messages(messages)] == [
        message["role"] for message in messages
    ]


def test_tool_call_of() -> None:
    arguments = {"a": {"b": []}}
    call = ToolCall.of("f", arguments)
    arguments["a"]["b"].append(1)
    assert call.arguments == {"a": {"b": []}}
    with pytest.raises(ContextError, match="arguments of f.x: set is not JSON"):
        ToolCall.of("f", {"x": {1}})


CALL = {"id": "c1", "name": "ping", "args": {}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content": "x"}, {"content": [{"type": "text", "text": "x"}]}),
        ({"content": "x"}, {"content": ["x"], "cache_control": {"type": "ephemeral"}}),
        (
            {"content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
            {"content": [{"type": "text", "text": "x", "citations": None}]},
        ),
        (
            {"content": [{"type": "text", "text": "x"}, {"type": "input_text", "text": "y"}]},
            {"content": ["x", {"type": "text", "text": "y", "cache_control": {}}]},
        ),
        (
            {"content": [{"type": "image", "url": "u", "cache_control": {}}]},
            {"content": [{"type": "image", "url": "u"}]},
        ),
        ({"content": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": [CALL]}),
        ({"content": [], "tool_calls": [CALL]}, {"tool_calls": [CALL | {"index": 0}]}),
        ({"content": "x", "tool_calls": [], "name": None}, {"content": "x", "refusal": None}),
        ({"content": "x", "reasoning_content": ""}, {"content": "x"}),
    ],
)
def test_the_same_words_in_another_form_are_the_same_message(one: dict, other: dict) -> None:
    """Clients move marks for caches from turn to turn, and turn texts into lists and back: each
    turn was a conversation of its own, or an edit of all of the last one."""
    role = {"role": "assistant"}
    a, b = parse_messages([role | one, role | other])
    assert a.content_hash == b.content_hash
    assert [message.to_openai() for message in parse_messages([a.to_openai(), b.to_openai()])] == [
        a.to_openai(),
        b.to_openai(),
    ]


def test_forms_that_say_something_else_are_other_messages() -> None:
    texts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    contents: list = ["x", "x\ny", texts, texts[::-1], [{"type": "refusal", "refusal": "z"}]]
    messages = parse_messages([{"role": "assistant", "content": content} for content in contents])
    assert len({message.content_hash for message in messages}) == len(contents)


def test_marks_for_caches_are_no_part_of_a_tool() -> None:
    schema = {"name": "f", "parameters": {"properties": {"cache_control": {"type": "string"}}}}
    plain = {"type": "function", "function": schema}
    marked = {**plain, "function": {**schema, "cache_control": {}}, "cache_control": {}}
    assert parse_tools([marked]) == parse_tools([plain])


def test_repeated_and_numeric_ids() -> None:
    """Frameworks give several messages one id, or a number: every later request failed."""
    given = [{"role": "user", "content": "x", "id": i} for i in ("run-1", "run-1", 7, 7.5, None)]
    assert [m.id for m in parse_messages(given)] == ["run-1", None, "7", "7.5", None]
    call = {"id": 3, "name": "f", "args": [1]}
    message, result = parse_messages(
        [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": 3}]
    )
    assert (message.tool_calls[0].id, message.tool_calls[0].arguments) == ("3", "[1]")
    assert (result.tool_call_id, result.content) == ("3", "")


USER = {"role": "user", "content": "x"}
DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]


def call(**fields: object) -> list:
    return [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "c", **fields}]}]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (USER, "must be a list of objects, not an object"),
        (None, "must be a list of objects, not null"),
        ("hello", "must be a list of objects, not a string"),
        ([USER, "hello"], r"Message 1: must be an object .* not a string"),
        ([{"content": "x"}], "Message 0, field 'role': is missing; must be one of system"),
        (
            [{"role": "human", "content": "x"}],
            "Message 0, field 'role': is 'human'; must be one of",
        ),
        ([{"role": ["user"], "content": "x"}], "Message 0, field 'role'"),
        (
            [{"role": "user", "content": 3}],
            "Message 0, field 'content': must be text.* not a number",
        ),
        ([{"role": "user", "content": [{"text": "x"}]}], r"field 'content'\[0\]: .*\"type\""),
        ([{"role": "user", "content": [{"type": "text"}]}], r"'content'\[0\]: .*needs \"text\""),
        ([USER | {"name": 3}], "Message 0, field 'name': must be a string, not a number"),
        ([USER | {"id": [3]}], "Message 0, field 'id': must be a string"),
        ([USER, USER | {"reasoning": {}}], "Message 1, field 'reasoning': must be a string"),
        (
            [USER | {"content": "a\ud800"}],
            r"field 'content': lone surrogate U\+D800 at character 1",
        ),
        ([USER | {"x": float("nan")}], "Message 0.x: nan is not a JSON number"),
        (
            [USER, USER | {"content": [{"type": "image", "at": [1, float("nan")]}]}],
            r"Message 1, field 'content'\[0\].at\[1\]: nan is not a JSON number",
        ),
        ([USER | {"usage": {"cost": float("inf")}}], "Message 0.usage.cost: inf is not"),
        ([USER | {"x": {1: 2}}], "Message 0.x: key 1 must be a string"),
        ([USER | {"x": 10**5000}], "Message 0: .*digits"),
        ([USER | {"x": DEEP}], "Message 0: nested too deeply"),
        ([USER | {"tool_calls": [{"name": "f"}]}], "only an assistant message can call tools"),
        ([{"role": "assistant", "tool_calls": {}}], "'tool_calls': must be a list of calls"),
        ([{"role": "assistant", "tool_calls": ["f"]}], r"tool_calls\[0\]': must be an object"),
        (call(function="f"), r"Message 1, field 'tool_calls\[0\]'.function: must be an object"),
        (call(args={}), r"Message 1, field 'tool_calls\[0\]': needs the name"),
        (call(name="", args={}), r"tool_calls\[0\]': needs the name"),
        (call(name="f", args={"a": [{"b": {1, 2}}]}), r"arguments.a\[0\].b: set is not JSON"),
        (call(name="f", args={"a": float("inf")}), "arguments.a: inf is not a JSON number"),
        (call(name="f", args={"a\udfff": 1}), r"lone surrogate U\+DFFF"),
        (call(name="f", args="\ud800"), "lone surrogate"),
        (call(name="f", args={}, type="custom"), "type: 'custom' is not known"),
        ([{"role": "assistant", "tool_calls": [{"id": [1], "name": "f"}]}], "id: must be a string"),
    ],
)
def test_wrong_shapes_are_named(messages: object, problem: str) -> None:
    with pytest.raises(ContextError, match=problem):
        parse_messages(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ({"name": "f"}, "Tools must be a list"),
        (["f"], "Tool 0: must be a schema object"),
        ([{}, {"name": "\ud800"}], "Tool 1.name: lone surrogate"),
    ],
)
def test_wrong_tools_are_named(tools: object, problem: str) -> None:
    with pytest.raises(ContextError, match=problem):
        parse_tools(tools)  # type: ignore[arg-type]


def test_load_conversation(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    path.write_text(json.dumps({"messages": agent_messages(), "tools": tools}), "utf-8-sig")
    conversation = load_conversation(path)
    assert conversation.messages == parse_messages(agent_messages())
    assert [tool.load() for tool in conversation.tools] == tools
    path.write_text(json.dumps(agent_messages()))
    assert load_conversation(str(path)).messages == conversation.messages
    assert load_conversation(path).tools == ()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"messages": [\n  {"role": }]}', "is not JSON: .* at line 2, column 12"),
        (b"", "is not JSON"),
        (b"\xff\xfe[]", "is not UTF-8 text"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "thousands of digits"),
        (b"[]", "has no messages"),
        (b'{"messages": []}', "has no messages"),
        (b'{"old": [], "new": []}', "has no \"messages\".*'old', 'new'"),
        (b"3", "must be a list of objects, not a number"),
        (b'{"messages": {"role": "user"}}', "must be a list"),
        (b'[{"role": "user", "content": "\\ud800"}]', "lone surrogate"),
        (b'[{"role": "user", "content": "x", "y": NaN}]', "nan is not a JSON number"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": {}}', "Tools must be a list"),
    ],
)
def test_bad_files_are_explained(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=problem) as error:
        load_conversation(path)
    assert str(path) in str(error.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no file .*missing.json"):
        load_conversation(tmp_path / "missing.json")
    with pytest.raises(InputError, match="cannot be read"):
        load_conversation(tmp_path)
