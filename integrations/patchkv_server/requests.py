"""From the body of a request to what the engine is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

from patchkv_agents.context import (
    FrozenJson,
    Message,
    parse_messages,
    parse_template_args,
    parse_tools,
)
from patchkv_agents.engine.generation import SamplingOptions, sampling_params
from patchkv_agents.errors import InputError
from patchkv_server.errors import ApiError, invalid
from patchkv_server.shapes import Shape

_LONGEST_NAME = 200

# What would change the answer and is not there. Everything else that is unknown is ignored.
_UNSUPPORTED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "logit_bias": "leave it out",
    "prediction": "leave it out",
    "audio": "this model answers with text",
    "web_search_options": "leave it out",
}
_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty")
_OPTIONS = (*_NUMBERS, "top_k", "seed", "repetition_penalty")


@dataclass(frozen=True, slots=True, eq=False)
class ChatRequest:
    """A request for an answer, checked.

    Attributes:
        tenant: whose it is.
        thread: name of the conversation, if one is given.
        messages, tools, template_args: the context.
        shape: of the context.
        tool_choice: `auto`, `none`, `any` or the name of a tool.
        one_call: at most one call of a tool is wanted.
        sampling: how the answer is made.
        stream: the answer is wanted in pieces.
        include_usage: with the usage behind them.
    """

    tenant: str
    thread: str | None
    messages: tuple[Message, ...]
    tools: tuple[FrozenJson, ...]
    template_args: FrozenJson
    shape: Shape
    tool_choice: str
    one_call: bool
    sampling: SamplingOptions
    stream: bool
    include_usage: bool

    @property
    def salt(self) -> str:
        """What tells this answer's calls from those of another: the context."""
        return blake2b("".join(self.shape.hashes).encode(), digest_size=16).hexdigest()


def read_json(body: bytes) -> dict[str, Any]:
    """The object in a body.

    Raises:
        ApiError: it is not one.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise invalid("the body is not JSON: send an object in UTF-8") from None
    if not isinstance(value, dict):
        raise invalid("the body has to be a JSON object")
    return value


def read_request(
    body: Mapping[str, Any],
    *,
    tenant: str,
    thread: str | None,
    models: Sequence[str],
    max_tokens: int,
) -> ChatRequest:
    """Check a request.

    Args:
        body: of the request.
        tenant: whose it is.
        thread: name of the conversation by its header.
        models: names of the model that is served.
        max_tokens: longest answer if the request does not say.

    Raises:
        ApiError: 400, naming the field; 404, another model is asked for.
        ContextError: messages or tools are malformed.
    """
    _check_supported(body)
    _check_model(body.get("model"), models)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages has to be a list of at least one message", "messages")
    parsed = parse_messages(messages)
    tools = parse_tools(body.get("tools"))
    for index, tool in enumerate(tools):
        schema = tool.load()
        function = schema.get("function")
        if schema.get("type") != "function" or not isinstance(function, dict):
            raise invalid("only tools of type 'function' are known", f"tools[{index}].type")
        if not isinstance(function.get("name"), str):
            raise invalid("a tool needs a name", f"tools[{index}].function.name")
    template_args = parse_template_args(body.get("chat_template_kwargs"))
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise invalid("stream_options has to be an object", "stream_options")
    return ChatRequest(
        tenant=tenant,
        thread=_name(thread if body.get("thread") is None else body["thread"], "thread"),
        messages=parsed,
        tools=tools,
        template_args=template_args,
        shape=Shape.of(parsed, tools, template_args),
        tool_choice=_tool_choice(body.get("tool_choice"), tools),
        one_call=_flag(body, "parallel_tool_calls", default=True) is False,
        sampling=_sampling(body, max_tokens),
        stream=_flag(body, "stream"),
        include_usage=bool(options.get("include_usage")),
    )


def user_of(body: Mapping[str, Any]) -> str | None:
    """Who the client says the user is.

    Raises:
        ApiError: 400, it is no name.
    """
    return _name(body.get("user"), "user")


def _check_supported(body: Mapping[str, Any]) -> None:
    for field, instead in _UNSUPPORTED.items():
        if body.get(field):
            raise invalid(f"{field} is not supported: {instead}", field, "unsupported_parameter")
    if body.get("n") not in (None, 1):
        raise invalid("n has to be 1: ask once for each answer", "n", "unsupported_value")
    modalities = body.get("modalities")
    if modalities not in (None, ["text"]):
        raise invalid("this model answers with text only", "modalities", "unsupported_value")
    answer_format = body.get("response_format")
    kind = answer_format.get("type") if isinstance(answer_format, dict) else answer_format
    if kind not in (None, "text"):
        raise invalid(
            "response_format has to be text: describe the form that you want in a message",
            "response_format",
            "unsupported_value",
        )


def _check_model(model: Any, models: Sequence[str]) -> None:
    if not isinstance(model, str):
        raise invalid(f"model is missing: it is {models[0]!r}", "model")
    if model not in models:
        raise ApiError(
            404,
            f"there is no such model here: the one that is served is {models[0]!r}",
            param="model",
            code="model_not_found",
        )


def _name(name: Any, field: str) -> str | None:
    """A name as a header carries it too: without spaces around it, and not empty."""
    if name is None:
        return None
    if not isinstance(name, str) or len(name) > _LONGEST_NAME or not name.isprintable():
        raise invalid(f"{field} has to be a name of at most {_LONGEST_NAME} characters", field)
    return name.strip() or None


def _tool_choice(choice: Any, tools: Sequence[FrozenJson]) -> str:
    if choice is None:
        return "auto"
    names = [tool.load()["function"]["name"] for tool in tools]
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(name, str) and name in names:
        return name
    if choice in ("auto", "none"):
        return str(choice)
    if choice == "required" and names:
        return "any"
    raise invalid(
        "tool_choice has to be 'auto', 'none', 'required' or one of the tools", "tool_choice"
    )


def _sampling(body: Mapping[str, Any], max_tokens: int) -> SamplingOptions:
    values: dict[str, Any] = {name: body[name] for name in _OPTIONS if body.get(name) is not None}
    wanted = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
    values["max_new_tokens"] = next((most for most in wanted if most is not None), max_tokens)
    values["stop"] = body.get("stop") or ()
    if _flag(body, "logprobs"):
        values["logprobs"] = body.get("top_logprobs") or 0
    elif body.get("top_logprobs"):
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    temperature = values.get("temperature")
    if isinstance(temperature, float) and 0 < temperature < 1e-3:
        values["temperature"] = 0.0
    sampling = cast(SamplingOptions, values)
    try:
        sampling_params(sampling)
    except InputError as error:
        field = str(error).partition(" ")[0]
        raise invalid(str(error), "max_tokens" if field == "max_new_tokens" else field) from None
    return sampling


def _flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(f"{name} has to be true or false", name)
    return value
