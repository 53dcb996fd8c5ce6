"""What templates do not show, and the forms in which they show it after all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from patchkv_agents.context import render
from patchkv_agents.errors import TemplateError

from .rendered import check

TokenizerWith = Callable[..., Any]

TURN = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
CALLS = """{%- for c in m.tool_calls or [] %}{{- '<tool_call>\\n{"name": "' + c.function.name +
    '", "arguments": ' }}{{- c.function.arguments if c.function.arguments is string
    else c.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{% endfor %}"""
# Knows system, user, assistant and tool, and leaves everything else out.
FOUR_ROLES = f"""\
{{%- for m in messages %}}{{%- if m.role in ('system', 'user') %}}{TURN}
{{%- elif m.role == 'assistant' %}}{TURN}{CALLS}
{{%- elif m.role == 'tool' %}}
{{{{- '<tool_response>' + m.content + '</tool_response>' }}}}{{% endif %}}{{%- endfor %}}"""
ONLY_NULL = """\
{%- for m in messages %}{%- if m.role == 'assistant' and m.content is none %}
{%- for c in m.tool_calls %}{{- '<|call|>' + c.function.name + c.function.arguments }}{% endfor %}
{%- elif m.content is not none %}{{- '<|' + m.role + '|>' + m.content }}{% endif %}{% endfor %}"""
STRICT = (
    """\
{%- for m in messages %}{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}
{{- raise_exception('a result without its call') }}{% endif %}
{%- if m.tool_calls and not loop.last and messages[loop.index0 + 1].role != 'tool' %}
{{- raise_exception('a call without its result') }}{% endif %}"""
    + f"{TURN}{CALLS}{{% endfor %}}"
)
ITEMS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '<function=' + c.function.name + '>' }}
{%- for k, v in c.function.arguments | items %}{{- '<' + k + '>' + (v | string) }}{% endfor %}
{%- endfor %}{{- '<|im_end|>\\n' }}{% endfor %}"""

USER = {"role": "user", "content": "Where is the lamp?"}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def called(arguments: Any = '{"item": "lamp"}', **more: Any) -> dict[str, Any]:
    function = {"name": "find", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def result(content: Any = "shelf 9", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": content, **more}


def test_roles_by_the_name_that_the_template_knows(tokenizer_with: TokenizerWith) -> None:
    """Instructions of a developer and results of a function were left out without a word."""
    tokenizer = tokenizer_with(FOUR_ROLES)
    messages = [
        {"role": "developer", "content": "Answer in French."},
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "shelf 9"},
    ]
    rendered = render(messages, tokenizer)
    check(rendered, tokenizer)
    assert rendered.omitted == ()
    assert "<|im_start|>system\nAnswer in French." in rendered.text
    assert "<tool_response>shelf 9</tool_response>" in rendered.text


def test_a_role_that_the_template_shows_stays(smollm2_tokenizer: Any) -> None:
    rendered = render([{"role": "developer", "content": "Be brief."}, USER], smollm2_tokenizer)
    assert "developer" in rendered.text


def test_calls_that_are_shown_without_content_only(tokenizer_with: TokenizerWith) -> None:
    tokenizer = tokenizer_with(ONLY_NULL)
    for content in (None, "", []):
        rendered = render([USER, called(content=content), result()], tokenizer)
        assert '<|call|>find{"item": "lamp"}' in rendered.text
    rendered = render([USER, called(content="I look."), result()], tokenizer)
    assert '<|assistant|>I look.<|call|>find{"item": "lamp"}' in rendered.text
    assert rendered.verified and rendered.omitted == ()


def test_tools_that_are_not_shown(tokenizer_with: TokenizerWith, smollm2_tokenizer: Any) -> None:
    rendered = render([USER], tokenizer_with(FOUR_ROLES), tools=[TOOL])
    assert rendered.omitted == ((-1, "tools"),)
    assert not rendered.verified and rendered.reason == "the template does not show the tools"
    rendered = render([USER], smollm2_tokenizer, tools=[TOOL])
    assert rendered.verified and rendered.omitted == ()


def test_what_no_form_makes_it_show(tokenizer_with: TokenizerWith) -> None:
    tokenizer = tokenizer_with(
        "{%- for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    rendered = render([{"role": "developer", "content": "Be brief."}, USER], tokenizer)
    assert rendered.omitted == ((0, "content"),)


@pytest.mark.parametrize("arguments", ["", " ", "null", '"x"', "[1]", '{"a": 1', {}, [1]])
@pytest.mark.parametrize("template", [None, ITEMS])
def test_arguments_that_are_no_object(
    arguments: Any, template: str | None, tokenizer_with: TokenizerWith, smollm2_tokenizer: Any
) -> None:
    """Prompts had `"arguments": }`, and templates that list the arguments failed for good."""
    tokenizer = smollm2_tokenizer if template is None else tokenizer_with(template)
    rendered = render([USER, called(arguments), result()], tokenizer)
    is_lost = arguments not in ("", " ", "null", {})
    assert len(rendered.notes) == (is_lost or arguments == "null")
    if template is None:
        shown = rendered.text.split("<tool_call>")[-1].split("</tool_call>")[0]
        given = arguments if isinstance(arguments, str) else json.dumps(arguments)
        expected = {"arguments": given} if is_lost else {}
        assert json.loads(shown) == {"name": "find", "arguments": expected}


def test_pictures_in_results_are_left_out_and_told(smollm2_tokenizer: Any) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "It looks so:"}, picture]
    rendered = render([USER, called(), result(content)], smollm2_tokenizer)
    assert "It looks so:\n[image_url left out: only text can be shown]" in rendered.text
    assert rendered.notes == ("message 2: a part of type 'image_url' in a result is left out",)


def test_refusals_are_shown(smollm2_tokenizer: Any) -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I may not."}]}
    assert (
        "assistant\nI may not.<|im_end|>" in render([USER, refused, USER], smollm2_tokenizer).text
    )


def test_calls_and_results_that_lack_each_other(tokenizer_with: TokenizerWith) -> None:
    """A history that was cut between them failed for good where a template looks."""
    tokenizer = tokenizer_with(STRICT)
    messages = [USER, result("shelf 8"), USER, called(), USER, called(), result(), called()]
    rendered = render(messages, tokenizer)
    check(rendered, tokenizer)
    assert "user\nResult of a tool: shelf 8" in rendered.text
    assert 'Called without a result: find({"item": "lamp"})' in rendered.text
    assert rendered.text.count("<tool_call>") == 2
    assert rendered.notes == (
        "message 1: a result without its call is shown as text",
        "message 3: calls without their results are shown as text",
    )
    lenient = render(messages, tokenizer_with(FOUR_ROLES))
    assert lenient.notes == () and "<tool_response>shelf 8</tool_response>" in lenient.text


def test_a_refusal_that_nothing_mends(tokenizer_with: TokenizerWith) -> None:
    tokenizer = tokenizer_with("{{ raise_exception('no') }}")
    with pytest.raises(TemplateError, match="refuses these messages: no"):
        render([USER], tokenizer)
