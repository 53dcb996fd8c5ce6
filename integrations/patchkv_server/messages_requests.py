"""Requests of Anthropic's Messages API, as messages in the form that everything else here has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from patchkv_agents.context import (
    FrozenJson,
    Message,
    parse_template_args,
    parse_tools,
)
from patchkv_agents.context.parsing import parse_message
from patchkv_agents.engine.generation import SamplingOptions
from patchkv_server.chat_requests import make_request
from patchkv_server.errors import invalid
from patchkv_server.requests import ChatRequest, Sender, validated

# Text of programs in system prompts that is another one with each request, and says nothing.
_ATTRIBUTION = re.compile(r"\s*x-anthropic-[a-z-]*header:.*\s*", re.IGNORECASE)
_NAMES = {"max_new_tokens": "max_tokens", "stop": "stop_sequences"}
_TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "any"}


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Block(_Open):
    """A block of content; which fields it has depends on its type."""

    type: str


class _Turn(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(_Open):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None


class _Thinking(BaseModel):
    type: str


class _Amount(BaseModel):
    type: str
    value: Annotated[int, Field(ge=0)]


class ContextEdit(_Open):
    """An edit that the server is to make: `clear_tool_uses_...` or `clear_thinking_...`."""

    type: str
    trigger: _Amount | None = None
    keep: _Amount | str | None = None
    clear_at_least: _Amount | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None


class _ContextManagement(BaseModel):
    edits: list[ContextEdit] = []


class MessagesBody(BaseModel):
    """A body of `/v1/messages` and of `/v1/messages/count_tokens`."""

    model: str
    messages: list[_Turn] = Field(min_length=1)
    max_tokens: int | None = None
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    stream: StrictBool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: _Thinking | None = None
    context_management: _ContextManagement | None = None

    @property
    def edits(self) -> Sequence[ContextEdit]:
        """The edits that the server is to make."""
        return self.context_management.edits if self.context_management else ()


def read_body(fields: Mapping[str, Any]) -> MessagesBody:
    """Check a body.

    Raises:
        ApiError: 400, naming the field.
    """
    output = fields.get("output_config")
    if isinstance(output, Mapping) and output.get("format"):
        raise invalid(
            "output_config.format is not supported: describe the form in a message",
            "output_config.format",
        )
    return validated(MessagesBody, fields)


def messages_of(body: MessagesBody) -> tuple[Message, ...]:
    """The messages of a request, its system prompt first.

    Raises:
        ContextError: a block is malformed.
    """
    given = [*_system(body.system), *(one for turn in body.messages for one in _turn(turn))]
    return tuple(parse_message(message, index) for index, message in enumerate(given))


def tools_of(body: MessagesBody) -> tuple[FrozenJson, ...]:
    """The tools of a request in OpenAI's form.

    Raises:
        ApiError: 400, a tool is one that Anthropic's servers run.
    """
    schemas = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom") and tool.input_schema is None:
            raise invalid(
                f"a tool of type {tool.type!r} runs on Anthropic's servers: leave it out",
                f"tools[{index}].type",
            )
        function = {"name": tool.name, "description": tool.description or ""}
        schemas.append(
            {"type": "function", "function": {**function, "parameters": tool.input_schema or {}}}
        )
    return parse_tools(schemas)


def request_of(
    body: MessagesBody,
    sender: Sender,
    messages: tuple[Message, ...],
    tools: tuple[FrozenJson, ...],
    *,
    max_tokens: int,
    knows_thinking: bool,
) -> ChatRequest:
    """The request for an answer.

    Args:
        body: of the request.
        sender: whose it is.
        messages, tools: the context; its messages may have been edited since they were sent.
        max_tokens: longest answer if the request does not say.
        knows_thinking: the model's template can be told whether to reason.

    Raises:
        ApiError: 400, naming the field.
    """
    arguments = {}
    if knows_thinking:
        arguments["enable_thinking"] = body.thinking is not None and body.thinking.type in (
            "enabled",
            "adaptive",
        )
    choice = body.tool_choice
    return make_request(
        sender,
        None,
        messages,
        tools,
        parse_template_args(arguments),
        tool_choice=_tool_choice(choice, body.tools or ()),
        one_call=bool(choice and choice.disable_parallel_tool_use),
        sampling=_sampling(body, max_tokens),
        names=_NAMES,
        stream=bool(body.stream),
    )


def _sampling(body: MessagesBody, max_tokens: int) -> SamplingOptions:
    values: Any = {"max_new_tokens": max_tokens if body.max_tokens is None else body.max_tokens}
    for name in ("temperature", "top_p", "top_k"):
        if (value := getattr(body, name)) is not None:
            values[name] = value
    values["stop"] = [text for text in body.stop_sequences or () if text]
    sampling: SamplingOptions = values
    return sampling


def _tool_choice(choice: _ToolChoice | None, tools: Sequence[_Tool]) -> str:
    if choice is None:
        return "auto"
    if choice.type == "tool":
        if choice.name not in [tool.name for tool in tools]:
            raise invalid("tool_choice.name has to be one of the tools", "tool_choice.name")
        return str(choice.name)
    if choice.type == "any" and not tools:
        raise invalid("tool_choice needs tools", "tool_choice")
    return _TOOL_CHOICES[choice.type]


def _system(system: str | Sequence[_Block] | None) -> Iterator[dict[str, Any]]:
    blocks = [system] if isinstance(system, str) else [_text(block) for block in system or ()]
    texts = [text for text in blocks if text and not _ATTRIBUTION.fullmatch(text)]
    if texts:
        yield {"role": "system", "content": "\n\n".join(texts)}


def _turn(turn: _Turn) -> Iterator[dict[str, Any]]:
    """A turn as messages: results of tools are messages of their own, before the user's text."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
    elif turn.role == "assistant":
        yield _answer(turn.content)
    else:
        results = [block for block in turn.content if block.type == "tool_result"]
        yield from (_result(block) for block in results)
        rest = [block for block in turn.content if block.type != "tool_result"]
        if rest or not results:
            yield {"role": turn.role, "content": [_part(block) for block in rest]}


def _answer(blocks: Sequence[_Block]) -> dict[str, Any]:
    texts, reasoning, calls = [], [], []
    for block in blocks:
        fields = block.model_extra or {}
        if block.type == "tool_use":
            arguments = fields.get("input")
            calls.append(
                {
                    "id": fields.get("id"),
                    "type": "function",
                    "function": {
                        "name": fields.get("name"),
                        "arguments": {} if arguments is None else arguments,
                    },
                }
            )
        elif block.type == "thinking":
            reasoning.append(str(fields.get("thinking", "")))
        elif text := _text(block):
            texts.append(text)
    return {
        "role": "assistant",
        "content": "\n".join(texts) or None,
        "reasoning": "\n".join(reasoning) or None,
        "tool_calls": calls,
    }


def _result(block: _Block) -> dict[str, Any]:
    fields = block.model_extra or {}
    content = fields.get("content")
    if isinstance(content, list):
        content = [_part(validated(_Block, part)) for part in content]
    if fields.get("is_error") and not content:
        content = "The tool failed."
    return {"role": "tool", "tool_call_id": fields.get("tool_use_id"), "content": content}


def _part(block: _Block) -> dict[str, Any]:
    text = _text(block)
    return {"type": block.type} if text is None else {"type": "text", "text": text}


def _text(block: _Block) -> str | None:
    """The text of a block; None if it has none, as a picture."""
    fields = block.model_extra or {}
    if block.type == "text":
        return str(fields.get("text") or "")
    source = fields.get("source")
    if block.type == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        return str(source.get("data") or "")
    if block.type == "search_result" and isinstance(fields.get("content"), list):
        parts = [_text(validated(_Block, part)) for part in fields["content"]]
        head = f"{fields.get('title', '')} ({fields.get('source', '')})"
        return "\n".join([head, *(part for part in parts if part)])
    return None
