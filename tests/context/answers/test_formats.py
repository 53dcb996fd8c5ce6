"""Calls as each family writes them, whole and cut into pieces at any place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkv_agents.context.answers import Answer, AnswerPiece
from patchkv_agents.context.answers.formats import (
    CallFormat,
    Glm4Format,
    GlmFormat,
    HermesFormat,
    LlamaFormat,
    MistralFormat,
)
from patchkv_agents.context.answers.parser import FormatParser
from patchkv_agents.context.parsing import parse_tools

TOOLS = parse_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                },
            },
        },
        {"name": "note", "parameters": {"type": "object", "properties": {}}},
    ]
)
Calls = list[tuple[str, dict[str, Any]]]


def parse(call_format: CallFormat, *pieces: str, tools: Any = TOOLS, **options: Any) -> Answer:
    parser = FormatParser(call_format, tools, **options)
    given_out: list[AnswerPiece] = []
    for piece in pieces:
        given_out += parser.feed(piece)
    given_out += parser.finish()
    answer = parser.answer
    assert "".join(piece.content for piece in given_out) == answer.content
    assert "".join(piece.reasoning for piece in given_out) == (answer.reasoning or "")
    assert tuple(piece.call for piece in given_out if piece.call) == answer.calls
    assert tuple(piece.invalid for piece in given_out if piece.invalid) == answer.invalid
    return answer


def calls_of(answer: Answer) -> Calls:
    return [(call.name, json.loads(call.arguments_json)) for call in answer.calls]


PARIS: Calls = [("weather", {"city": "Paris"})]
BOTH: Calls = [("weather", {"city": "Paris", "days": 2}), ("note", {})]
EXAMPLES: list[tuple[CallFormat, str, Calls, str, str | None]] = [
    # hermes
    (
        HermesFormat(),
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        PARIS,
        "",
        None,
    ),
    (
        HermesFormat(),
        "<think>\nWhich city?\nParis.\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
        '\n<tool_call>\n{"name": "note", "arguments": {}}\n</tool_call>',
        BOTH,
        "I look.",
        "Which city?\nParis.",
    ),
    (  # a list in one block, and the end of the answer in the place of the last marker
        HermesFormat(),
        '<tool_call>[{"name": "weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "note", "arguments": {}}]',
        BOTH,
        "",
        None,
    ),
    (  # arguments as a text of JSON, with a line break in it
        HermesFormat(),
        '<tool_call>{"name": "note", "arguments": "{\\"text\\": \\"a\\\\nb\\"}"}</tool_call>',
        [("note", {"text": "a\nb"})],
        "",
        None,
    ),
    (  # the closing marker in an argument
        HermesFormat(),
        '<tool_call>\n{"name": "note", "arguments": {"text": "ends with </tool_call>"}}\n'
        "</tool_call>\nDone. ",
        [("note", {"text": "ends with </tool_call>"})],
        "Done.",
        None,
    ),
    # llama3
    (
        LlamaFormat(),
        '{"name": "weather", "parameters": {"city": "Paris"}}',
        PARIS,
        "",
        None,
    ),
    (
        LlamaFormat(),
        '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}; '
        '{"type": "function", "function": {"name": "note", "parameters": {}}, "parameters": {}}',
        BOTH,
        "",
        None,
    ),
    (
        LlamaFormat(),
        'I look. <|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}',
        PARIS,
        "I look.",
        None,
    ),
    # glm
    (
        GlmFormat(),
        "\n<think>Paris.</think>\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
        "</tool_call>\n<tool_call>note\n</tool_call>",
        BOTH,
        "I look.",
        "Paris.",
    ),
    (  # a text that looks like a number stays a text, and may hold the closing marker
        GlmFormat(),
        "<tool_call>weather<arg_key>city</arg_key><arg_value>75</tool_call></arg_value></tool_call>"
        "<tool_call>note<arg_key>x</arg_key><arg_value>[1]</arg_value></tool_call>",
        [("weather", {"city": "75</tool_call>"}), ("note", {"x": [1]})],
        "",
        None,
    ),
    # glm4
    (Glm4Format(), 'weather\n{"city": "Paris"}', PARIS, "", None),
    (
        Glm4Format(),
        '\nI look.<|assistant|>weather\n{"city": "Paris", "days": 2}<|assistant|>note\n{}',
        BOTH,
        "I look.",
        None,
    ),
    # mistral
    (
        MistralFormat(),
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "note", "arguments": {}}]',
        BOTH,
        "",
        None,
    ),
    (
        MistralFormat(),
        '[THINK]Paris.[/THINK]I look.[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}'
        "[TOOL_CALLS]note[ARGS]{}",
        BOTH,
        "I look.",
        "Paris.",
    ),
    (MistralFormat(), '[TOOL_CALLS]weather{"city": "Paris"}', PARIS, "", None),
]
FIELDS = ("call_format", "text", "calls", "content", "reasoning")
IDS = [f"{example[0].name}-{number}" for number, example in enumerate(EXAMPLES)]


@pytest.mark.parametrize(
    ("call_format", "text", "calls", "content", "reasoning"), EXAMPLES, ids=IDS
)
def test_calls_are_read(
    call_format: CallFormat, text: str, calls: Calls, content: str, reasoning: str | None
) -> None:
    answer = parse(call_format, text)
    assert calls_of(answer) == calls
    assert (answer.content, answer.reasoning, answer.invalid) == (content, reasoning, ())


@pytest.mark.parametrize(
    ("call_format", "text", "calls", "content", "reasoning"), EXAMPLES, ids=IDS
)
def test_character_by_character_gives_the_same(
    call_format: CallFormat, text: str, calls: Calls, content: str, reasoning: str | None
) -> None:
    assert parse(call_format, *text) == parse(call_format, text)


FORMATS: list[CallFormat] = [
    HermesFormat(),
    LlamaFormat(),
    GlmFormat(),
    Glm4Format(),
    MistralFormat(),
]
FRAGMENTS = [
    *{marker for call_format in FORMATS for marker in call_format.markers},
    *("weather", "note", "\n", " ", "{", "}", "[", "]", '{"name": "weather", ', '"arguments": {}}'),
    *('"parameters": {"city": "Paris"}}', "{}", ";", "text", "<", "tool_call>", "</", "🙂"),
]


@given(
    call_format=st.sampled_from(FORMATS),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    in_reasoning=st.booleans(),
)
def test_how_an_answer_is_cut_makes_no_difference(
    call_format: CallFormat, fragments: list[str], cuts: list[int], in_reasoning: bool
) -> None:
    text = "".join(fragments)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    whole = parse(call_format, text, in_reasoning=in_reasoning)
    assert parse(call_format, *pieces, in_reasoning=in_reasoning) == whole
    assert parse(call_format, *text, in_reasoning=in_reasoning) == whole


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda call_format: call_format.name)
@given(text=st.text(alphabet="abc {}<>[]|\n\"'", max_size=40))
def test_without_tools_all_is_text(call_format: CallFormat, text: str) -> None:
    answer = parse(call_format, "A" + text, tools=())
    assert (answer.content, answer.calls) == ("A" + text, ())


@pytest.mark.parametrize(
    ("call_format", "text", "error"),
    [
        (HermesFormat(), '<tool_call>\n{"name": "weather"\n</tool_call>', "not JSON"),
        (HermesFormat(), '<tool_call>{"arguments": {}}</tool_call>', "no name"),
        (HermesFormat(), '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not an object"),
        (HermesFormat(), "<tool_call>7</tool_call>", "a JSON object"),
        (LlamaFormat(), "<|python_tag|>print(1)", "not JSON"),
        (LlamaFormat(), "<|python_tag|>", "nothing follows"),
        (GlmFormat(), "<tool_call>weather\n<arg_key>city</tool_call>", "pairs"),
        (GlmFormat(), "<tool_call>\n</tool_call>", "no name"),
        (Glm4Format(), 'weather\n{"city": ', "not JSON"),
        (MistralFormat(), '[TOOL_CALLS][{"name": "weather"', "not JSON"),
        (MistralFormat(), "[TOOL_CALLS]weather[ARGS]city", "JSON object"),
    ],
)
def test_what_cannot_be_read_stays_in_the_text(
    call_format: CallFormat, text: str, error: str
) -> None:
    answer = parse(call_format, text)
    assert answer.calls == ()
    assert answer.content == text
    assert [invalid.text for invalid in answer.invalid] == [text]
    assert error in answer.invalid[0].error


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    text = '<tool_call>{"name": </tool_call>\n<tool_call>{"name": "note"}</tool_call>'
    answer = parse(HermesFormat(), text)
    assert calls_of(answer) == [("note", {})]
    assert answer.content == '<tool_call>{"name": </tool_call>'


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        (LlamaFormat(), '{"answer": 42}'),
        (LlamaFormat(), '{"name": "Paris", "inhabitants": 2'),
        (LlamaFormat(), "{not JSON}"),
        (Glm4Format(), "weather\nis fine"),
        (Glm4Format(), "Paris\n{}"),
    ],
)
def test_text_that_looks_like_a_call_is_text(call_format: CallFormat, text: str) -> None:
    answer = parse(call_format, text)
    assert (answer.content, answer.calls, answer.invalid) == (text, (), ())


def test_text_is_given_out_as_soon_as_it_cannot_be_a_call() -> None:
    parser = FormatParser(HermesFormat(), TOOLS)
    assert [piece.content for piece in parser.feed("I look <tool")] == ["I look"]
    assert parser.feed("_cal") == []
    assert [piece.content for piece in parser.feed("m>!")] == [" <tool_calm>!"]


def test_reasoning_that_the_prompt_began() -> None:
    answer = parse(HermesFormat(), "Hm.\n</think>\n\nYes.", in_reasoning=True)
    assert (answer.reasoning, answer.content) == ("Hm.", "Yes.")
    cut = parse(HermesFormat(), "Hm, let me", in_reasoning=True)
    assert (cut.reasoning, cut.content) == ("Hm, let me", "")


def test_ids_are_the_same_at_each_run_and_differ_between_calls_and_answers() -> None:
    text = 2 * '<tool_call>{"name": "note"}</tool_call>'
    first, second = parse(HermesFormat(), text, salt="1"), parse(HermesFormat(), text, salt="2")
    ids = [call.id for call in (*first.calls, *second.calls)]
    assert len(set(ids)) == 4
    assert parse(HermesFormat(), text, salt="1") == first
    assert all(call_id is not None and call_id.startswith("call_") for call_id in ids)
    [mistral] = parse(MistralFormat(), '[TOOL_CALLS][{"name": "note"}]').calls
    assert mistral.id is not None and len(mistral.id) == 9 and mistral.id.isalnum()
    [own] = parse(MistralFormat(), '[TOOL_CALLS][{"name": "note", "id": "abcdefghi"}]').calls
    assert own.id == "abcdefghi"


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda call_format: call_format.name)
def test_an_opening_makes_an_answer_a_call(call_format: CallFormat) -> None:
    opening = call_format.opening(["weather"])
    assert opening is not None
    rest = {
        "hermes": ' {"city": "Paris"}}\n</tool_call>',
        "llama3": ' {"city": "Paris"}}',
        "glm": "<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        "glm4": '"city": "Paris"}',
        "mistral": ' {"city": "Paris"}}]',
    }[call_format.name]
    assert calls_of(parse(call_format, opening + rest)) == PARIS
