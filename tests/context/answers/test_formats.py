"""Calls as each family writes them, whole and cut into pieces at any place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkv_agents.context.answers import Answer, AnswerPiece
from patchkv_agents.context.answers.arguments import argument_types
from patchkv_agents.context.answers.formats import (
    FORMATS,
    CallFormat,
    Glm4Format,
    GlmFormat,
    HarmonyFormat,
    HarmonyParser,
    JsonFormat,
    LlamaFormat,
    MistralFormat,
)
from patchkv_agents.context.answers.parser import AnswerParser, FormatParser
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


def parser_of(call_format: CallFormat, tools: Any, **options: Any) -> AnswerParser:
    types = argument_types(tools)
    if isinstance(call_format, HarmonyFormat):
        within = "<|start|>assistant<|channel|>analysis<|message|>"
        in_reasoning = options.pop("in_reasoning", False)
        return HarmonyParser(types, prompt=within if in_reasoning else "", **options)
    return FormatParser(call_format, types, **options)


def parse(call_format: CallFormat, *pieces: str, tools: Any = TOOLS, **options: Any) -> Answer:
    parser = parser_of(call_format, tools, **options)
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


FUNCTION = "<tool_call><function=weather><parameter=city>Paris</parameter></function></tool_call>"


def deepseek(*calls: str) -> str:
    bar, low = "\uff5c", "\u2581"

    def mark(name: str) -> str:
        return f"<{bar}{name.replace('_', low)}{bar}>"

    blocks = "".join(
        mark("tool_call_begin") + call.replace("{SEP}", mark("tool_sep")) + mark("tool_call_end")
        for call in calls
    )
    return mark("tool_calls_begin") + blocks + mark("tool_calls_end")


def dsml(name: str) -> str:
    """The same calls as `BOTH`, in tags that say which values are texts."""
    text = (
        f'<@{name}>\n<@invoke name="weather">\n<@parameter name="city" string="true">Paris'
        '</@parameter>\n<@parameter name="days" string="false">2</@parameter>\n</@invoke>\n'
        f'<@invoke name="note">\n</@invoke>\n</@{name}>'
    )
    return text.replace("@", "\uff5cDSML\uff5c")


BAR = "\uff5cDSML\uff5c"
PARIS: Calls = [("weather", {"city": "Paris"})]
BOTH: Calls = [("weather", {"city": "Paris", "days": 2}), ("note", {})]
EXAMPLES: list[tuple[CallFormat, str, Calls, str, str | None]] = [
    # hermes
    (
        JsonFormat(),
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        PARIS,
        "",
        None,
    ),
    (
        JsonFormat(),
        "<think>\nWhich city?\nParis.\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
        '\n<tool_call>\n{"name": "note", "arguments": {}}\n</tool_call>',
        BOTH,
        "I look.",
        "Which city?\nParis.",
    ),
    (  # a list in one block, and the end of the answer in the place of the last marker
        JsonFormat(),
        '<tool_call>[{"name": "weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "note", "arguments": {}}]',
        BOTH,
        "",
        None,
    ),
    (  # arguments as a text of JSON, with a line break in it
        JsonFormat(),
        '<tool_call>{"name": "note", "arguments": "{\\"text\\": \\"a\\\\nb\\"}"}</tool_call>',
        [("note", {"text": "a\nb"})],
        "",
        None,
    ),
    (  # the closing marker in an argument
        JsonFormat(),
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
    # qwen3_coder: a text that looks like a number, lines in it, the markers left out
    (
        FORMATS["qwen3_coder"],
        "<think>Paris.</think>\nI look.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n"
        "</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=note>\n</function>\n</tool_call>",
        BOTH,
        "I look.",
        "Paris.",
    ),
    (
        FORMATS["qwen3_coder"],
        "Use <function=x>.\n<function=weather>\n<parameter=city>\n12\n\n3 </parameter> 4\n"
        "</parameter>\n</function>\n</tool_call>",
        [("weather", {"city": "12\n\n3 </parameter> 4"})],
        "Use <function=x>.\n</tool_call>",
        None,
    ),
    (JsonFormat(), FUNCTION, PARIS, "", None),
    (
        FORMATS["seed"],
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n"
        "</seed:tool_call>",
        PARIS,
        "",
        None,
    ),
    # harmony
    (
        HarmonyFormat(),
        "<|channel|>analysis<|message|>Paris.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Paris", "days": 2}<|call|><|start|>assistant '
        "to=functions.note<|channel|>commentary json<|message|>{}<|call|>",
        BOTH,
        "I look.",
        "Paris.",
    ),
    (
        HarmonyFormat(),
        "<|channel|>final<|message|>Hi, to=functions.weather.<|return|>",
        [],
        "Hi, to=functions.weather.",
        None,
    ),
    (HarmonyFormat(), "No channel at all.", [], "No channel at all.", None),
    (
        HarmonyFormat(),
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}',
        PARIS,
        "",
        None,
    ),
    # gemma4
    (
        FORMATS["gemma4"],
        '<|channel>thought\nParis.\n<channel|>I look.<|tool_call>call:weather{city:<|"|>Paris<|"|>,'
        "days:2}<tool_call|><|tool_call>call:note{}<tool_call|>",
        BOTH,
        "I look.",
        "Paris.",
    ),
    (
        FORMATS["gemma4"],
        '<|tool_call>call:note{a:[1,-2.5,<|"|>x,y}<|"|>],b:{c:true,<|"|>d e<|"|>:null},'
        'f:<|"|><tool_call|> {"a": 1}<|"|>}<tool_call|>',
        [
            (
                "note",
                {
                    "a": [1, -2.5, "x,y}"],
                    "b": {"c": True, "d e": None},
                    "f": '<tool_call|> {"a": 1}',
                },
            )
        ],
        "",
        None,
    ),
    # deepseek
    (
        FORMATS["deepseek"],
        "I look." + deepseek('weather{SEP}{"city": "Paris", "days": 2}', "note{SEP}{}"),
        BOTH,
        "I look.",
        None,
    ),
    (
        FORMATS["deepseek"],
        deepseek(
            'function{SEP}weather\n```json\n{"city": "Paris", "days": 2}\n```',
            "function{SEP}note\n```json\n{}\n```",
        ),
        BOTH,
        "",
        None,
    ),
    (FORMATS["dsml"], "I look.\n\n" + dsml("function_calls"), BOTH, "I look.", None),
    (FORMATS["dsml4"], dsml("tool_calls"), BOTH, "", None),
    # minimax
    (
        FORMATS["minimax"],
        '<think>\nParis.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="weather">\n'
        '<parameter name="city">Paris</parameter>\n<parameter name="days">2</parameter>\n'
        "</invoke>\n"
        '<invoke name="note">\n</invoke>\n</minimax:tool_call>',
        BOTH,
        "I look.",
        "Paris.",
    ),
    # kimi
    (
        FORMATS["kimi"],
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|>'
        "<|tool_call_begin|>functions.note:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        BOTH,
        "I look.",
        None,
    ),
    # lists of JSON
    (
        FORMATS["nemotron"],
        'I look.\n\n<TOOLCALL>[{"name": "weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "note", "arguments": {}}]</TOOLCALL>',
        BOTH,
        "I look.",
        None,
    ),
    (
        FORMATS["granite"],
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]',
        PARIS,
        "",
        None,
    ),
    (
        FORMATS["granite"],
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]<|/tool_call|>',
        PARIS,
        "",
        None,
    ),
    (
        FORMATS["cohere"],
        "<|START_THINKING|>Paris.<|END_THINKING|><|START_ACTION|>[\n"
        '{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}}\n]'
        "<|END_ACTION|>",
        PARIS,
        "",
        "Paris.",
    ),
    # Python
    (
        FORMATS["lfm2"],
        '<|tool_call_start|>[weather(city="Paris", days=2), note()]<|tool_call_end|>I look.',
        BOTH,
        "I look.",
        None,
    ),
    (
        FORMATS["olmo3"],
        '<function_calls>\nweather(city="Paris", days=2)\nnote()\n</function_calls>',
        BOTH,
        "",
        None,
    ),
    (LlamaFormat(), '[weather(city="Paris")]', PARIS, "", None),
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


FRAGMENTS = [
    *{marker for call_format in FORMATS.values() for marker in call_format.markers},
    *("weather", "note", "\n", " ", "{", "}", "[", "]", '{"name": "weather", ', '"arguments": {}}'),
    *('"parameters": {"city": "Paris"}}', "{}", ";", "text", "<", "tool_call>", "</", "🙂"),
]


@given(
    call_format=st.sampled_from(list(FORMATS.values())),
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


@pytest.mark.parametrize("call_format", FORMATS.values(), ids=FORMATS)
@given(text=st.text(alphabet="abc {}<>[]|\n\"'", max_size=40))
def test_without_tools_all_is_text(call_format: CallFormat, text: str) -> None:
    answer = parse(call_format, "A" + text, tools=())
    assert (answer.content, answer.calls) == ("A" + text, ())


@pytest.mark.parametrize(
    ("call_format", "text", "error"),
    [
        (JsonFormat(), '<tool_call>\n{"name": "weather"\n</tool_call>', "not JSON"),
        (JsonFormat(), '<tool_call>{"arguments": {}}</tool_call>', "no name"),
        (JsonFormat(), '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not an object"),
        (JsonFormat(), "<tool_call>7</tool_call>", "a JSON object"),
        (LlamaFormat(), "<|python_tag|>print(1)", "keyword"),
        (LlamaFormat(), "<|python_tag|>1 + 1", "no parameters"),
        (LlamaFormat(), "<|python_tag|>", "nothing follows"),
        (GlmFormat(), "<tool_call>weather\n<arg_key>city</tool_call>", "pairs"),
        (GlmFormat(), "<tool_call>\n</tool_call>", "no name"),
        (Glm4Format(), 'weather\n{"city": ', "not JSON"),
        (MistralFormat(), '[TOOL_CALLS][{"name": "weather"', "not JSON"),
        (MistralFormat(), "[TOOL_CALLS]weather[ARGS]city", "JSON object"),
        (FORMATS["qwen3_coder"], "<tool_call>\nweather\n</tool_call>", "<function=NAME>"),
        (FORMATS["qwen3_coder"], "<tool_call><function=weather>Paris</tool_call>", "in tags"),
        (FORMATS["gemma4"], "<|tool_call>weather<tool_call|>", "call:NAME"),
        (FORMATS["gemma4"], '<|tool_call>call:note{a:<|"|>b}<tool_call|>', "not closed"),
        (FORMATS["gemma4"], "<|tool_call>call:note{a:1", "not closed"),
        (FORMATS["minimax"], "<minimax:tool_call>\n</minimax:tool_call>", "no name"),
        (
            FORMATS["kimi"],
            "<|tool_calls_section_begin|>note<|tool_calls_section_end|>",
            "between its markers",
        ),
        (FORMATS["lfm2"], "<|tool_call_start|>[note(1)]<|tool_call_end|>", "keyword"),
        (FORMATS["lfm2"], "<|tool_call_start|>[note(a=b())]<|tool_call_end|>", "literal"),
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
    answer = parse(JsonFormat(), text)
    assert calls_of(answer) == [("note", {})]
    assert answer.content == '<tool_call>{"name": </tool_call>'


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        (LlamaFormat(), '{"answer": 42}'),
        (LlamaFormat(), '{"name": "Paris", "parameters": {"river": "Seine"}}'),
        (LlamaFormat(), "[weather is fine]"),
        (FORMATS["qwen3_coder"], "<function=other></function>"),
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
    parser = parser_of(JsonFormat(), TOOLS)
    assert [piece.content for piece in parser.feed("I look <tool")] == ["I look"]
    assert parser.feed("_cal") == []
    assert [piece.content for piece in parser.feed("m>!")] == [" <tool_calm>!"]


def test_reasoning_that_the_prompt_began() -> None:
    answer = parse(JsonFormat(), "Hm.\n</think>\n\nYes.", in_reasoning=True)
    assert (answer.reasoning, answer.content) == ("Hm.", "Yes.")
    cut = parse(JsonFormat(), "Hm, let me", in_reasoning=True)
    assert (cut.reasoning, cut.content) == ("Hm, let me", "")


def test_ids_are_the_same_at_each_run_and_differ_between_calls_and_answers() -> None:
    text = 2 * '<tool_call>{"name": "note"}</tool_call>'
    first, second = parse(JsonFormat(), text, salt="1"), parse(JsonFormat(), text, salt="2")
    ids = [call.id for call in (*first.calls, *second.calls)]
    assert len(set(ids)) == 4
    assert parse(JsonFormat(), text, salt="1") == first
    assert all(call_id is not None and call_id.startswith("call_") for call_id in ids)
    [mistral] = parse(MistralFormat(), '[TOOL_CALLS][{"name": "note"}]').calls
    assert mistral.id is not None and len(mistral.id) == 9 and mistral.id.isalnum()
    [own] = parse(MistralFormat(), '[TOOL_CALLS][{"name": "note", "id": "abcdefghi"}]').calls
    assert own.id == "abcdefghi"


@pytest.mark.parametrize("call_format", FORMATS.values(), ids=FORMATS)
def test_an_opening_makes_an_answer_a_call(call_format: CallFormat) -> None:
    opening = call_format.opening(["weather"])
    assert opening is not None
    rest = {
        "hermes": ' {"city": "Paris"}}\n</tool_call>',
        "llama3": ' {"city": "Paris"}}',
        "glm": "<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        "glm4": '"city": "Paris"}',
        "mistral": ' {"city": "Paris"}}]',
        "qwen3_coder": "<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "seed": "<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        "harmony": '{"city": "Paris"}<|call|>',
        "gemma4": 'city:<|"|>Paris<|"|>}<tool_call|>',
        "deepseek": '{"city": "Paris"}',
        "dsml": f'<{BAR}parameter name="city" string="true">Paris</{BAR}parameter></{BAR}invoke>',
        "dsml4": f'<{BAR}parameter name="city" string="true">Paris</{BAR}parameter></{BAR}invoke>',
        "kimi": '{"city": "Paris"}',
        "minimax": '<parameter name="city">Paris</parameter></invoke></minimax:tool_call>',
        "nemotron": ' {"city": "Paris"}}]</TOOLCALL>',
        "granite": ' {"city": "Paris"}}]',
        "apriel": ' {"city": "Paris"}}]</tool_calls>',
        "cohere": ' {"city": "Paris"}}]<|END_ACTION|>',
        "lfm2": 'city="Paris")]<|tool_call_end|>',
        "olmo3": 'city="Paris")\n</function_calls>',
    }[call_format.name]
    assert calls_of(parse(call_format, opening + rest)) == PARIS


def test_kimis_ids_are_kept() -> None:
    """Its template shows a call's id, which holds the tool's name, and not the name."""
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.note:3"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    assert [call.id for call in parse(FORMATS["kimi"], text).calls] == ["functions.note:3"]


def test_text_of_several_harmony_messages_does_not_run_together() -> None:
    first = "<|channel|>commentary<|message|>One.<|end|><|start|>assistant"
    text = f"{first}<|channel|>final<|message|>Two."
    assert parse(HarmonyFormat(), text).content == "One.\n\nTwo."


def test_harmony_reasoning_streams() -> None:
    parser = HarmonyParser(argument_types(TOOLS))
    assert parser.feed("<|channel|>anal") == []
    assert [piece.reasoning for piece in parser.feed("ysis<|message|>Hm, le")] == ["Hm, le"]
    assert [piece.reasoning for piece in parser.feed("t me<|en")] == ["t me"]
