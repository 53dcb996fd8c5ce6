"""Requests of OpenAI's chat completions and completions, and what other servers add to them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

from patchkv_agents.context import (
    FrozenJson,
    Message,
    parse_messages,
    parse_template_args,
    parse_tools,
)
from patchkv_agents.context.rendering.template import RAW_TEXT
from patchkv_agents.engine.generation import SamplingOptions
from patchkv_server.errors import ApiError, invalid
from patchkv_server.requests import ChatRequest, Sender, checked_name, checked_sampling, validated
from patchkv_server.shapes import Shape

_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
# What would change the answer and is not done. Everything else that is unknown is ignored.
_UNSUPPORTED: dict[str, tuple[Sequence[Any], str]] = {
    "functions": (_NOTHING, "use tools"),
    "function_call": ((*_NOTHING, "none", "auto"), "use tool_choice"),
    "logit_bias": (_NOTHING, "leave it out"),
    "prediction": (_NOTHING, "leave it out"),
    "audio": (_NOTHING, "this model answers with text"),
    "web_search_options": (_NOTHING, "leave it out"),
    "n": ((None, 1), "ask once for each answer"),
    "best_of": ((None, 1), "ask once for each answer"),
    "modalities": ((*_NOTHING, ["text"]), "this model answers with text only"),
    "response_format": (
        (*_NOTHING, "text", {"type": "text"}),
        "describe the form that you want in a message",
    ),
    "continue_final_message": (_NOTHING, "an answer is a message of its own; leave it out"),
    "add_generation_prompt": ((None, True), "an answer is a message of its own; leave it out"),
    "chat_template": (_NOTHING, "the model's own is used"),
    "documents": (_NOTHING, "put them into a message"),
    "echo": (_NOTHING, "leave it out"),
    "suffix": (_NOTHING, "write the model's own marks for infilling into the prompt"),
    "ignore_eos": (_NOTHING, "leave it out"),
    "min_tokens": (_NOTHING, "leave it out"),
    "use_beam_search": (_NOTHING, "leave it out"),
    "prompt_logprobs": (_NOTHING, "leave it out"),
    "length_penalty": ((*_NOTHING, 1), "leave it out"),
    "truncate_prompt_tokens": ((*_NOTHING, -1), "shorten the messages"),
    **{
        field: (_NOTHING, "describe the form that you want in a message")
        for field in (
            *("grammar", "json_schema", "structured_outputs", "guided_json", "guided_regex"),
            *("guided_choice", "guided_grammar"),
        )
    },
    **{
        field: (_NOTHING, "leave it out")
        for field in ("bad_words", "stop_token_ids", "allowed_token_ids", "logits_processors")
    },
}


def _unless_default(value: Any) -> Any:
    """None in place of -1, by which clients of other servers mean that nothing is set."""
    return None if value == -1 and not isinstance(value, bool) else value


def _texts(value: Any) -> Any:
    """Stop strings as a list; empty ones mean none."""
    texts = [value] if isinstance(value, str) else value
    return [text for text in texts if text != ""] if isinstance(texts, list) else texts


# Pieces of a text that end where a sentence or line does: a text that goes on, or is edited, has
# most of them again.
_PIECE = re.compile(r"(?s).{64,}?(?:\n+|[.!?;] +)|.+\Z")

Limit = Annotated[int | None, BeforeValidator(_unless_default)]
Flag = StrictBool | None


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class _Tool(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: _Function


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class _Body(BaseModel):
    """Fields of both APIs."""

    model: str
    thread: str | None = None
    user: str | None = None
    stream: Flag = None
    stream_options: _StreamOptions | None = None
    max_tokens: Limit = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: Limit = None
    seed: Limit = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_texts)] = None

    def sampling(self, max_tokens: int) -> SamplingOptions:
        """Options that are set; `max_tokens` is the longest answer if none is."""
        values: Any = {"max_new_tokens": max_tokens if self.max_tokens is None else self.max_tokens}
        for name in _OPTIONS:
            if (value := getattr(self, name)) is not None:
                values[name] = value
        result: SamplingOptions = values
        return result


_OPTIONS = (
    *("temperature", "top_p", "min_p", "top_k", "seed", "stop"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)


class ChatBody(_Body):
    """A body of `/v1/chat/completions`."""

    messages: list[Any] = Field(min_length=1)
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag = None
    max_completion_tokens: Limit = None
    logprobs: Flag = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream is to end with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class TextBody(_Body):
    """A body of `/v1/completions`."""

    prompt: str | list[Any]
    logprobs: int | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream is to end with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


def check_model(model: str, models: Sequence[str]) -> None:
    """Check that a model is the one that is served.

    Raises:
        ApiError: 404, it is another one.
    """
    if model not in models:
        raise ApiError(
            404,
            f"there is no such model here: the one that is served is {models[0]!r}",
            param="model",
            code="model_not_found",
        )


def check_supported(fields: Mapping[str, Any]) -> None:
    """Check that nothing is asked for that would change the answer and is not done.

    Raises:
        ApiError: 400, naming the field.
    """
    for field, (harmless, instead) in _UNSUPPORTED.items():
        if field in fields and fields[field] not in harmless:
            raise invalid(f"{field} is not supported: {instead}", field, "unsupported_parameter")


def read_chat(
    fields: Mapping[str, Any], sender: Sender, models: Sequence[str], max_tokens: int
) -> tuple[ChatBody, ChatRequest]:
    """Check a request for a chat completion.

    Args:
        fields: of the body.
        sender: whose it is.
        models: names of the model that is served.
        max_tokens: longest answer if the request does not say.

    Raises:
        ApiError: 400, naming the field; 404, another model is asked for.
        ContextError: messages or tools are malformed.
    """
    check_supported(fields)
    body = validated(ChatBody, fields)
    check_model(body.model, models)
    for index, message in enumerate(body.messages):
        if isinstance(message, Mapping) and message.get("prefix"):
            raise invalid(
                "prefix is not supported: an answer is a message of its own",
                f"messages[{index}].prefix",
                "unsupported_parameter",
            )
    tools = parse_tools([tool.model_dump(exclude_unset=True) for tool in body.tools or ()])
    arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    if body.max_completion_tokens is not None:
        body.max_tokens = body.max_completion_tokens
    sampling = body.sampling(max_tokens)
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    request = make_request(
        sender,
        body.thread,
        parse_messages(body.messages),
        tools,
        parse_template_args(arguments),
        tool_choice=_tool_choice(body.tool_choice, body.tools or ()),
        one_call=body.parallel_tool_calls is False,
        sampling=sampling,
        stream=bool(body.stream),
    )
    return body, request


def read_text(
    fields: Mapping[str, Any], sender: Sender, models: Sequence[str], max_tokens: int
) -> tuple[TextBody, ChatRequest]:
    """Check a request for a completion of a text; as `read_chat`."""
    check_supported(fields)
    body = validated(TextBody, fields)
    check_model(body.model, models)
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if len(prompts) != 1 or not isinstance(prompts[0], str) or not prompts[0]:
        raise invalid("prompt has to be one text that is not empty: ask once for each", "prompt")
    if body.logprobs is not None:
        raise invalid("logprobs is not supported: use /v1/chat/completions", "logprobs")
    request = make_request(
        sender,
        body.thread,
        # Answers among them cannot be told from the rest: any piece counts as one.
        tuple(Message("assistant", piece) for piece in _PIECE.findall(prompts[0])),
        (),
        parse_template_args({RAW_TEXT: True}),
        tool_choice="none",
        one_call=False,
        sampling=body.sampling(min(max_tokens, 16) if body.max_tokens is None else max_tokens),
        stream=bool(body.stream),
        is_raw=True,
    )
    return body, request


def make_request(
    sender: Sender,
    thread: str | None,
    messages: tuple[Message, ...],
    tools: tuple[FrozenJson, ...],
    template_args: FrozenJson,
    *,
    sampling: SamplingOptions,
    names: Mapping[str, str] | None = None,
    **options: Any,
) -> ChatRequest:
    """A request with its shape; the sampling options are checked.

    Raises:
        ApiError: 400, the thread's name or a sampling option is wrong.
    """
    return ChatRequest(
        tenant=sender.tenant,
        thread=checked_name(sender.thread if thread is None else thread, "thread"),
        messages=messages,
        tools=tools,
        template_args=template_args,
        shape=Shape.of(messages, tools, template_args),
        sampling=checked_sampling(sampling, names=names or {"max_new_tokens": "max_tokens"}),
        **options,
    )


def _tool_choice(choice: str | Mapping[str, Any] | None, tools: Sequence[_Tool]) -> str:
    names = [tool.function.name for tool in tools]
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(name, str) and name in names:
        return name
    if choice in (None, "auto"):
        return "auto"
    if choice == "none":
        return "none"
    if choice == "required" and names:
        return "any"
    raise invalid(
        "tool_choice has to be 'auto', 'none', 'required' or one of the tools", "tool_choice"
    )
