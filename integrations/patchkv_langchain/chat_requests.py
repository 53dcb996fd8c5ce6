"""Messages and models for answers that are values."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

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
        chunks = [chunk for chunk in message.tool_call_chunks if not is_beside(chunk)]
        update["tool_call_chunks"] = chunks
    return message.model_copy(update=update)


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
