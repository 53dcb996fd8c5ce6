"""What a template leaves out is told, or refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ..engine.models import tiny_engine
from .serving import MODEL, Served, serving

USER = {"role": "user", "content": "Where is the lamp?"}
TOOL: Any = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
# Shows a call, and neither tools nor text beside a result's name.
TEMPLATE = """\
{%- for m in messages %}{%- if m.role in ('user', 'tool') %}{{- m.role + ': ' + m.content + '\\n' }}
{%- elif m.role == 'assistant' and (SHOWS) %}{{- 'call ' + m.tool_calls[0].function.name + '\\n' }}
{%- endif %}{% endfor %}"""


@pytest.fixture(scope="module", params=["m.tool_calls", "false"], ids=["calls", "no calls"])
def served(request: Any, smollm2_tokenizer: Any) -> Iterator[Served]:
    tokenizer = copy.deepcopy(smollm2_tokenizer)
    tokenizer.chat_template = TEMPLATE.replace("SHOWS", request.param)
    with serving(tiny_engine(tokenizer, 2048)) as served:
        yield served


def ask(served: Served, messages: Any, **options: Any) -> Any:
    client = served.client()
    options = {"model": MODEL, "max_tokens": 2, **options}
    return client.chat.completions.create(messages=messages, **options)


def test_messages_that_the_template_leaves_out(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """A developer's instructions were never seen by the model, and the answer was a plain 200."""
    messages = [{"role": "developer", "content": "Answer in French."}, USER]
    recovery = ask(served, messages).recovery
    assert recovery["omitted"] == [[0, "content"]]
    assert "does not show: content of message 0" in caplog.text
    assert "French" not in caplog.text
    assert ask(served, [USER]).recovery["omitted"] == []


def test_tools_that_the_template_leaves_out(served: Served, request: Any) -> None:
    if "no calls" not in request.node.name:  # it may know tools without being shown them
        assert [-1, "tools"] in ask(served, [USER], tools=[TOOL]).recovery["omitted"]
        return
    with pytest.raises(openai.BadRequestError, match="template of 'tiny' shows no tools") as caught:
        ask(served, [USER], tools=[TOOL])
    assert caught.value.param == "tools"
    assert ask(served, [USER], tools=[TOOL], tool_choice="none").choices
