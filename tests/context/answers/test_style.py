"""Answers as real chat templates show them, taken apart again."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patchkv_agents.context import Message, ToolCall, parse_messages, parse_tools, render
from patchkv_agents.context.answers import AnswerStyle, parse_answer
from patchkv_agents.errors import InputError, TemplateError

from .. import templates

TOOLS = parse_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Look up the weather.",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                },
            },
        }
    ]
)
ASKED = parse_messages([{"role": "user", "content": "How is the weather in Zürich?"}])

# Written after GLM-4.5's format: name, then keys and values.
GLM45 = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\n# Tools' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}{{- '<|' + message.role + '|>' }}
{%- if message.role == 'assistant' %}{{- '\\n<think></think>' }}
{%- if message.content %}{{- '\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{- '</arg_value>' }}{% endfor %}
{{- '\\n</tool_call>' }}{% endfor %}
{%- else %}{{- '\\n' + message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""


def answered(tokenizer: Any, message: Message, **template_args: Any) -> list[int]:
    """Ids of an answer with the text that the template shows behind the prompt."""
    asked = render(ASKED, tokenizer, tools=TOOLS, template_args=template_args)
    whole = render(
        [*ASKED, message],
        tokenizer,
        tools=TOOLS,
        template_args=template_args,
        add_generation_prompt=False,
    )
    assert whole.text.startswith(asked.text)
    text = whole.text[len(asked.text) :]
    return list(tokenizer.encode(text, add_special_tokens=False))


def check_round_trip(tokenizer: Any, *, content: str, calls: int, call_id: str) -> None:
    made = [
        ToolCall.of("weather", {"city": "Zürich", "days": day}, call_id)
        for day in range(1, calls + 1)
    ]
    message = Message("assistant", content=content, tool_calls=tuple(made))
    answer = parse_answer(answered(tokenizer, message), tokenizer, TOOLS)
    assert [(call.name, call.arguments) for call in answer.calls] == [
        (call.name, call.arguments) for call in made
    ]
    assert (answer.content, answer.invalid, answer.reasoning) == (content, (), None)


@pytest.mark.parametrize(
    ("family", "style"),
    [("qwen3", "hermes"), ("llama3", "llama3"), ("glm4", "glm4"), ("mistral", "mistral")],
)
def test_calls_survive_the_template(
    family_tokenizer: Callable[[str], Any], family: str, style: str
) -> None:
    tokenizer = family_tokenizer(family)
    call_format = AnswerStyle.of(tokenizer).call_format
    assert call_format is not None and call_format.name == style
    for calls in range(1, templates.FAMILIES[family].calls + 1):
        check_round_trip(tokenizer, content="", calls=calls, call_id="abcdefghi")
    if family in ("qwen3", "glm4"):
        check_round_trip(tokenizer, content="I look.", calls=2, call_id="abcdefghi")


def test_the_embedded_models_calls_survive_its_template(smollm2_tokenizer: Any) -> None:
    check_round_trip(smollm2_tokenizer, content="I look.", calls=2, call_id="1")


def test_glms_keys_and_values_survive_the_template(
    tokenizer_with: Callable[..., Any],
) -> None:
    family = templates.FAMILIES["glm4"]
    markers = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    tokenizer = tokenizer_with(GLM45, family.special + markers)
    call_format = AnswerStyle.of(tokenizer).call_format
    assert call_format is not None and call_format.name == "glm"
    check_round_trip(tokenizer, content="I look.", calls=2, call_id="1")


@pytest.mark.parametrize("marker", ["<tool_call>", "</tool_call>"])
def test_markers_that_are_special_tokens_are_seen(
    tokenizer_with: Callable[..., Any], marker: str
) -> None:
    """Decoding leaves special tokens out, and the call with them would be text."""
    tokenizer = tokenizer_with(templates.QWEN3, templates.FAMILIES["qwen3"].special)
    tokenizer.add_tokens([marker], special_tokens=True)
    assert AnswerStyle.of(tokenizer).markers == (marker,)
    check_round_trip(tokenizer, content="I look.", calls=1, call_id="1")


def test_llamas_tag_is_kept_and_other_special_tokens_are_not(
    tokenizer_with: Callable[..., Any],
) -> None:
    special = (*templates.FAMILIES["llama3"].special, "<|python_tag|>")
    tokenizer = tokenizer_with(templates.LLAMA3, special)
    text = '<|python_tag|>{"name": "weather", "parameters": {}}<|eot_id|>'
    answer = parse_answer(tokenizer.encode(text), tokenizer, TOOLS)
    assert [call.name for call in answer.calls] == ["weather"]
    assert parse_answer(tokenizer.encode("Hi<|eot_id|>"), tokenizer, TOOLS).content == "Hi"


def test_reasoning_is_taken_out(qwen3: Any) -> None:
    message = Message("assistant", content="Fine.", reasoning="Look at the sky.")
    answer = parse_answer(answered(qwen3, message), qwen3, TOOLS)
    assert (answer.reasoning, answer.content) == ("Look at the sky.", "Fine.")
    assert answer.to_message() == message


def test_reasoning_that_the_template_begins(qwen3: Any) -> None:
    tokenizer = copy.copy(qwen3)
    tokenizer.chat_template = templates.QWEN3 + "{{- '<think>\\n' if add_generation_prompt }}"
    ids = tokenizer.encode("Hm.\n</think>\n\nFine.")
    answer = parse_answer(ids, tokenizer)
    assert (answer.reasoning, answer.content) == ("Hm.", "Fine.")
    without = "{{- '<think>\\n' if add_generation_prompt and enable_thinking is not defined }}"
    tokenizer.chat_template = templates.QWEN3 + without
    answer = parse_answer(
        tokenizer.encode("Fine."), tokenizer, template_args={"enable_thinking": 0}
    )
    assert (answer.reasoning, answer.content) == (None, "Fine.")


def test_a_template_that_knows_no_tools(family_tokenizer: Callable[[str], Any]) -> None:
    tokenizer = family_tokenizer("gemma3")
    style = AnswerStyle.of(tokenizer)
    assert style.call_format is None
    text = '<tool_call>{"name": "weather"}</tool_call>'
    assert parse_answer(tokenizer.encode(text), tokenizer, TOOLS).content == text
    with pytest.raises(InputError, match="cannot be forced"):
        style.opening(TOOLS)


def test_a_style_can_be_named(qwen3: Any) -> None:
    style = AnswerStyle.of(qwen3, "mistral")
    ids = qwen3.encode('[TOOL_CALLS]weather[ARGS]{"city": "Bern"}')
    assert parse_answer(ids, qwen3, TOOLS, style=style).calls[0].arguments == {"city": "Bern"}
    with pytest.raises(InputError, match="hermes, llama3"):
        AnswerStyle.of(qwen3, "unknown")


def test_openings_of_calls(qwen3: Any) -> None:
    style = AnswerStyle.of(qwen3)
    assert style.opening(TOOLS, "weather").endswith('{"name": "weather", "arguments":')
    two = (*TOOLS, *parse_tools([{"name": "note"}]))
    assert style.opening(two).endswith('{"name": "')
    with pytest.raises(InputError, match="no tool 'news'"):
        style.opening(TOOLS, "news")


def with_response_template(tokenizer: Any, call_content: str) -> Any:
    """A response template as Transformers documents them, for ChatML with Hermes' calls."""
    pytest.importorskip("transformers.utils.chat_parsing")
    tokenizer = copy.copy(tokenizer)
    function = "{content}"
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<think>\n", "close": "\n</think>\n\n"},
            "content": {"close": "<|im_end|>"},
            "tool_calls": {
                "open": "<tool_call>\n",
                "close": "\n</tool_call>",
                "content": call_content,
                "repeats": True,
                "transform": {"type": "function", "function": function},
            },
        },
    }
    return tokenizer


def test_transformers_own_response_template_is_used(qwen3: Any) -> None:
    tokenizer = with_response_template(qwen3, "json")
    text = (
        "<think>\nWhich city?\n</think>\n\nI look."
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": "2"}}\n</tool_call>'
        "<|im_end|>"
    )
    answer = parse_answer(tokenizer.encode(text), tokenizer, TOOLS)
    assert (answer.reasoning, answer.content) == ("Which city?", "I look.")
    # Transformers makes a number of the text, as the tool's schema wants.
    assert [json.loads(call.arguments_json) for call in answer.calls] == [
        {"city": "Bern", "days": 2}
    ]
    assert answer.calls[0].id is not None


def test_what_a_response_template_cannot_read_is_not_lost(qwen3: Any) -> None:
    tokenizer = with_response_template(qwen3, "json")
    text = 'I look.<tool_call>\n{"name": weather}\n</tool_call> And more.'
    answer = parse_answer(tokenizer.encode(text), tokenizer, TOOLS)
    assert answer.calls == () and len(answer.invalid) == 1
    assert answer.content == 'I look.{"name": weather} And more.'


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("<tool_call>\n<function=f>", "qwen3_coder"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("<|tool_call>call:", "gemma4"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek"),
        ("<\uff5cDSML\uff5cfunction_calls>", "dsml"),
        ("{% set dsml = '\uff5cDSML\uff5c' %}<{{ dsml }}tool_calls>", "dsml4"),
        ("<|tool_call_begin|>", "kimi"),
        ("<minimax:tool_call>", "minimax"),
        ("<TOOLCALL>[", "nemotron"),
        ("<|tool_call|><|/tool_call|>", "granite"),
        ("<|tool_list_start|>", "lfm2"),
        ("]<]minimax[>[<tool_call>", None),  # a form that is not known
        ("<tools:new><call>", None),
    ],
)
def test_formats_are_found_from_templates(template: str, style: str | None) -> None:
    call_format = AnswerStyle.of(SimpleNamespace(chat_template=template)).call_format
    assert (None if call_format is None else call_format.name) == style


def real_templates() -> list[Path]:
    folder = Path(os.environ.get("PATCHKV_TOKENIZERS") or "/nowhere")
    return sorted([*folder.glob("*.jinja"), *folder.glob("*/tokenizer.json")])


@pytest.mark.skipif(
    not real_templates(), reason="PATCHKV_TOKENIZERS names no folder of templates or tokenizers"
)
@pytest.mark.parametrize("path", real_templates(), ids=lambda path: path.stem + path.parent.stem)
def test_calls_survive_real_templates(path: Path, tokenizer_with: Callable[..., Any]) -> None:
    """Of the folder that `PATCHKV_TOKENIZERS` names: tokenizers, and templates alone (*.jinja)."""
    from transformers import AutoTokenizer

    if path.suffix == ".jinja":
        tokenizer = tokenizer_with(path.read_text())
    else:
        tokenizer = AutoTokenizer.from_pretrained(path.parent)
    style = AnswerStyle.of(tokenizer)
    if style.call_format is None:
        pytest.skip("it shows no calls in a form that is known")
    identifier = "functions.weather:0" if style.call_format.name == "kimi" else "abcdefghi"
    call = ToolCall.of("weather", {"city": "Zürich", "days": 3}, identifier)
    try:
        asked = render(ASKED, tokenizer, tools=TOOLS).text
        whole, plain = (
            render([*ASKED, message], tokenizer, tools=TOOLS, add_generation_prompt=False).text
            for message in (
                Message("assistant", content="", tool_calls=(call,)),
                Message("assistant", content="PLAIN"),
            )
        )
    except TemplateError:
        pytest.skip("it cannot be rendered by Transformers")
    text = whole.removesuffix(plain.rpartition("PLAIN")[2])
    start = len(os.path.commonprefix([asked, whole]))
    if start < len(asked):  # prompts end with a beginning of reasoning that answers do not show
        start = whole.rfind("<", 0, start + 1)
    if "weather" not in text[start:]:
        pytest.skip("it shows no calls of earlier answers")
    parser = style.parser(TOOLS)
    begin, end = style.call_format.thinking
    reasons = asked.rstrip().endswith(begin.rstrip())
    for character in (end if reasons else "") + text[start:]:
        parser.feed(character)
    parser.finish()
    calls = [(call.name, call.arguments) for call in parser.answer.calls]
    assert calls == [(call.name, call.arguments)], text[start:]
