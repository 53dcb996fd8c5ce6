"""What a call asks of the answer: tools to call, a value to give."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    InvalidToolCall,
    ToolCallChunk,
)
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from patchkv_agents.errors import InputError

if TYPE_CHECKING:
    from patchkv_agents.context import FrozenJson
    from patchkv_agents.context.answers import AnswerStyle


def shown_messages(messages: Sequence[BaseMessage], response_format: Any) -> list[BaseMessage]:
    """The messages as the model is shown them, one by one.

    Invalid calls whose text is in the content beside them are left out, and a schema that the
    answer has to fit comes behind the text of the last message.

    Args:
        messages: of the call. Not changed.
        response_format: as OpenAI's, or None.
    """
    shown = [_without_invalid(message) for message in messages]
    wanted = response_format.get("json_schema") if isinstance(response_format, dict) else None
    if not isinstance(wanted, dict):
        return shown
    schema = json.dumps(wanted.get("schema", wanted), ensure_ascii=False)
    request = f"Answer with one JSON object that fits this schema, and nothing else:\n{schema}"
    last = shown[-1] if shown else None
    if isinstance(last, HumanMessage) and isinstance(last.content, str):
        return [*shown[:-1], last.model_copy(update={"content": f"{last.content}\n\n{request}"})]
    return [*shown, HumanMessage(request)]


def _without_invalid(message: BaseMessage) -> BaseMessage:
    if not isinstance(message, AIMessage) or not message.invalid_tool_calls:
        return message
    text = str(message.text)

    def is_beside(call: InvalidToolCall | ToolCallChunk) -> bool:
        return not call["name"] and (call["args"] or "") in text

    update: dict[str, Any] = {
        "invalid_tool_calls": [c for c in message.invalid_tool_calls if not is_beside(c)]
    }
    if isinstance(message, AIMessageChunk):  # calls are made of them again
        kept = [chunk for chunk in message.tool_call_chunks if not is_beside(chunk)]
        update["tool_call_chunks"] = kept
    return message.model_copy(update=update)


def tool_choice_of(tool_choice: str | bool | dict[str, Any] | None, names: Sequence[str]) -> str:
    """`auto`, `none`, `any` or the name of a tool.

    Raises:
        InputError: there is no tool of the name.
    """
    if isinstance(tool_choice, dict):  # as OpenAI's
        function = tool_choice.get("function")
        tool_choice = str(function.get("name") if isinstance(function, dict) else tool_choice)
    if tool_choice is None or tool_choice is False:
        return "auto"
    if tool_choice is True or tool_choice == "required":
        return "any"
    if tool_choice not in ("auto", "none", "any", *names):
        raise InputError(
            f"tool_choice is {tool_choice!r}: use 'auto', 'none', 'any' or one of {list(names)}"
        )
    return tool_choice


def beginning(
    style: AnswerStyle,
    tools: Sequence[FrozenJson],
    tool_choice: str,
    response_format: Any,
    *,
    template_args: Mapping[str, Any] | None = None,
) -> str:
    """The text with which the answer has to begin; empty if it may begin as it likes.

    Raises:
        InputError: no text makes an answer of this style a call.
    """
    if tool_choice not in ("auto", "none"):
        return style.opening(
            tools, None if tool_choice == "any" else tool_choice, template_args=template_args
        )
    return "{" if response_format is not None else ""


def structured(
    bind: Callable[..., Runnable[Any, AIMessage]],
    schema: dict[str, Any] | type,
    *,
    method: str,
    strict: bool | None,
    include_raw: bool,
) -> Runnable[Any, Any]:
    """A model whose answers are JSON, and what makes values of them.

    Args:
        bind: of the model.
        schema: a Pydantic class, a `TypedDict`, or a JSON schema.
        method: `json_schema` shows the schema to the model, `json_mode` does not.
        strict: goes into the schema.
        include_raw: see LangChain's `with_structured_output`.

    Raises:
        InputError: there is no such method.
    """
    if method not in ("json_schema", "json_mode"):
        raise InputError(
            f"method is {method!r}: use 'function_calling', 'json_schema' or 'json_mode'"
        )
    wanted: dict[str, Any] = {"type": "json_object"}
    if method == "json_schema":
        json_schema = convert_to_json_schema(schema, strict=strict)
        wanted = {"type": "json_schema", "json_schema": {"schema": json_schema}}
    model = bind(
        response_format=wanted,
        ls_structured_output_format={"kwargs": {"method": method}, "schema": schema},
    )
    parser: Runnable[Any, Any] = JsonOutputParser()
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        parser = PydanticOutputParser[Any](pydantic_object=schema)
    if not include_raw:
        return model | parser
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    fallback = parsed.with_fallbacks([failed], exception_key="parsing_error")
    return RunnableMap(raw=model) | fallback
