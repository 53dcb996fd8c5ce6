"""Requests of OpenAI's Responses API, as messages in the form that everything else here has."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictBool

from patchkv_agents.context import FrozenJson, Message, parse_template_args, parse_tools
from patchkv_agents.context.parsing import parse_message
from patchkv_server.chat_requests import make_request
from patchkv_server.errors import invalid
from patchkv_server.requests import ChatRequest, Sender, validated

_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_UNSUPPORTED: dict[str, tuple[Sequence[Any], str]] = {
    "background": (_NOTHING, "wait for the answer, or stream it"),
    "conversation": (_NOTHING, "use previous_response_id"),
    "prompt": (_NOTHING, "use instructions"),
    "truncation": ((*_NOTHING, "disabled"), "shorten the input"),
    "top_logprobs": ((*_NOTHING, 0), "use /v1/chat/completions"),
}
_OWN = ("function", "custom")
_CUSTOM = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Schema of the arguments of a tool that takes a text."""


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Item(_Open):
    type: str = "message"


class Tool(_Open):
    """A tool: a function, a custom one, which takes a text, or a namespace of these."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: list[Tool] | None = None


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model is shown.

    Attributes:
        shown_name: by which the model calls it.
        tool: as the client gave it.
        namespace: in which it is, if it is in one.
    """

    shown_name: str
    tool: Tool
    namespace: str | None = None


class _Text(BaseModel):
    format: dict[str, Any] | None = None


class _Reasoning(_Open):
    effort: str | None = None


class ResponsesBody(BaseModel):
    """A body of `/v1/responses`."""

    model: str
    input: str | list[_Item] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: StrictBool | None = None
    store: StrictBool | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None

    @property
    def offered(self) -> dict[str, OfferedTool]:
        """The tools that the model is shown, by the names that it is shown."""
        found = []
        for tool in self.tools or ():
            if tool.type in _OWN and tool.name:
                found.append(OfferedTool(tool.name, tool))
            elif tool.type == "namespace" and tool.name:
                found += [
                    OfferedTool(_shown_name(inner.name, tool.name), inner, tool.name)
                    for inner in tool.tools or ()
                    if inner.type in _OWN and inner.name
                ]
        return {offered.shown_name: offered for offered in found}

    @property
    def hosted(self) -> Iterator[str]:
        """What is left out: tools that only OpenAI's servers run, in words."""
        for index, tool in enumerate(self.tools or ()):
            if tool.type not in (*_OWN, "namespace"):
                yield f"tool {index} of type {tool.type!r} is left out: this server does not run it"


def read_body(fields: Mapping[str, Any]) -> ResponsesBody:
    """Check a body.

    Raises:
        ApiError: 400, naming the field.
    """
    for field, (harmless, instead) in _UNSUPPORTED.items():
        if field in fields and fields[field] not in harmless:
            raise invalid(f"{field} is not supported: {instead}", field, "unsupported_parameter")
    body = validated(ResponsesBody, fields)
    kind = (body.text.format if body.text else None) or {}
    if kind.get("type", "text") != "text":
        raise invalid(
            "text.format is not supported: describe the form that you want in the input",
            "text.format",
            "unsupported_value",
        )
    return body


def input_messages(body: ResponsesBody, first: int) -> tuple[Message, ...]:
    """The messages of a request's input.

    Args:
        body: of the request.
        first: index of the first of them in the context, for errors.

    Raises:
        ApiError: 400, an item is of a type that is not known.
        ContextError: an item is malformed.
    """
    if isinstance(body.input, str):
        given = [{"role": "user", "content": body.input}] if body.input else []
    else:
        given = _messages(body.input)
    return tuple(parse_message(message, first + index) for index, message in enumerate(given))


def tools_of(body: ResponsesBody) -> tuple[FrozenJson, ...]:
    """The tools of a request in the form of chat completions."""
    schemas = []
    for name, offered in body.offered.items():
        tool = offered.tool
        parameters = _CUSTOM if tool.type == "custom" else tool.parameters or {}
        function = {"name": name, "description": tool.description or ""}
        schemas.append({"type": "function", "function": {**function, "parameters": parameters}})
    return parse_tools(schemas)


def request_of(
    body: ResponsesBody, sender: Sender, messages: tuple[Message, ...], *, max_tokens: int
) -> ChatRequest:
    """The request for an answer.

    Args:
        body: of the request.
        sender: whose it is.
        messages: the context.
        max_tokens: longest answer if the request does not say.

    Raises:
        ApiError: 400, naming the field.
    """
    values: Any = {"max_new_tokens": body.max_output_tokens or max_tokens}
    for name in ("temperature", "top_p"):
        if (value := getattr(body, name)) is not None:
            values[name] = value
    effort = body.reasoning.effort if body.reasoning else None
    return make_request(
        sender,
        None,
        messages,
        tools_of(body),
        parse_template_args({} if effort is None else {"reasoning_effort": effort}),
        tool_choice=_tool_choice(body.tool_choice, body.offered),
        one_call=body.parallel_tool_calls is False,
        sampling=values,
        names={"max_new_tokens": "max_output_tokens"},
        stream=bool(body.stream),
    )


def _shown_name(name: Any, namespace: Any) -> Any:
    return f"{namespace}__{name}" if namespace else name


def _tool_choice(choice: str | Mapping[str, Any] | None, names: Container[Any]) -> str:
    if isinstance(choice, Mapping) and choice.get("name") in names:
        return str(choice["name"])
    if choice in (None, "auto"):
        return "auto"
    if choice == "none":
        return "none"
    if choice == "required":
        return "any"
    raise invalid(
        "tool_choice has to be 'auto', 'none', 'required' or one of the tools", "tool_choice"
    )


def _messages(items: Sequence[_Item]) -> list[dict[str, Any]]:
    """Items as messages: reasoning, text and calls of an answer are one."""
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None  # the message to which items of an answer belong

    def answering(*, with_text: bool = False) -> dict[str, Any]:
        nonlocal answer
        if answer is None or (with_text and (answer["content"] or answer["tool_calls"])):
            answer = {"role": "assistant", "content": None, "reasoning": None, "tool_calls": []}
            messages.append(answer)
        return answer

    for index, item in enumerate(items):
        fields = item.model_extra or {}
        if item.type == "message" and fields.get("role") == "assistant":
            answering(with_text=True)["content"] = fields.get("content")
        elif item.type == "reasoning":
            texts = [*(fields.get("content") or ()), *(fields.get("summary") or ())]
            said = [
                str(text["text"]) for text in texts if isinstance(text, dict) and "text" in text
            ]
            answer = None
            answering()["reasoning"] = "\n".join(said) or None
        elif item.type in ("function_call", "custom_tool_call"):
            arguments = fields.get("arguments")
            if item.type == "custom_tool_call":
                arguments = json.dumps({"input": fields.get("input")}, ensure_ascii=False)
            name = _shown_name(fields.get("name"), fields.get("namespace"))
            function = {"name": name, "arguments": arguments}
            call = {"id": fields.get("call_id"), "type": "function", "function": function}
            answering()["tool_calls"].append(call)
        elif item.type == "message":
            answer = None
            messages.append({"role": fields.get("role"), "content": fields.get("content")})
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            answer = None
            result = {"role": "tool", "tool_call_id": fields.get("call_id")}
            messages.append({**result, "content": fields.get("output")})
        else:
            raise invalid(f"an item of type {item.type!r} is not known", f"input[{index}].type")
    return messages
