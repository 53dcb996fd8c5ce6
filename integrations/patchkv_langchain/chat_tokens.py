"""Counts tokens as the engine renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

from patchkv_agents.context import from_langchain, render
from patchkv_agents.errors import ContextError, InputError
from patchkv_langchain.chat_requests import shown_messages

if TYPE_CHECKING:
    from patchkv_agents.engine import Engine


def text_tokens(engine: Engine, text: str) -> list[int]:
    """Token ids of a text by itself."""
    ids: list[int] = engine.tokenizer.encode(text, add_special_tokens=False)
    return ids


def prompt_tokens(
    engine: Engine,
    messages: Sequence[BaseMessage],
    tools: Sequence[Any],
    template_args: Mapping[str, Any],
) -> int:
    """How many tokens the prompt for these messages has, up to the beginning of the answer.

    Messages that the chat template refuses as they are, such as a part of a conversation, count by
    their texts.

    Args:
        engine: renders them.
        messages: none count as nothing.
        tools: in any form that LangChain knows.
        template_args: of the chat template.

    Raises:
        ContextError: a message or tool cannot be rendered.
    """
    if not messages:
        return 0
    shown = from_langchain(shown_messages(messages, None), keep="shown")
    schemas = [convert_to_openai_tool(tool) for tool in tools]
    try:
        return len(render(shown, engine.tokenizer, tools=schemas, template_args=template_args))
    except ContextError:
        raise
    except InputError:
        return sum(len(text_tokens(engine, message.text)) for message in shown)
