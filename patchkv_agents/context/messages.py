"""Messages of a context: immutable values, equal only if everything in them is equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from patchkv_agents.context.frozen import FrozenJson, check_json, to_json
from patchkv_agents.errors import ContextError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of parts of content that are text."""

NO_EXTRA = FrozenJson("{}")

METADATA_FIELDS = frozenset(
    (
        "annotations",
        "artifact",
        "cache_control",
        "created",
        "created_at",
        "finish_reason",
        "langchain",
        "logprobs",
        "metadata",
        "provider_specific_fields",
        "response_metadata",
        "timestamp",
        "usage",
        "usage_metadata",
    )
)
"""Fields that tell how a message came about, and that no model is shown.

`metadata` is one only if it is an object: GLM-4's templates show a text of that name.
"""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant message makes.

    `arguments_json` holds the arguments as text. With `raw`, that is the caller's own string,
    byte for byte (it need not be valid JSON); otherwise the caller gave an object, whose key
    order is kept. `extra` holds unknown fields, those of OpenAI's inner object under `function`.
    """

    name: str
    arguments_json: str = "{}"
    raw: bool = False
    id: str | None = None
    extra: FrozenJson = NO_EXTRA

    @classmethod
    def of(cls, name: str, arguments: str | Mapping[str, Any], id: str | None = None) -> ToolCall:
        """Make a call from its arguments: an object (copied) or a raw JSON string.

        Raises:
            ContextError: the arguments are not JSON.
        """
        if isinstance(arguments, str):
            return cls(name, arguments, raw=True, id=id)
        frozen = FrozenJson.of(dict(arguments), f"arguments of {name}")
        return cls(name, frozen.text, id=id)

    @property
    def arguments(self) -> str | dict[str, Any]:
        """The arguments in the caller's form: the raw string, or a fresh dict."""
        if self.raw:
            return self.arguments_json
        value: dict[str, Any] = json.loads(self.arguments_json)
        return value

    def parsed_arguments(self) -> Any:
        """The arguments as a value, or the raw string where that is not valid JSON.

        Python reads more than JSON: NaN, and escapes that make no character.
        """
        try:
            value = json.loads(self.arguments_json)
            check_json(value, "arguments")
        except (ValueError, RecursionError, ContextError):
            return self.arguments_json
        return value

    def to_openai(self) -> dict[str, Any]:
        """The call in OpenAI form, as a fresh dict."""
        call: dict[str, Any] = {} if self.id is None else {"id": self.id}
        call["type"] = "function"
        extra = self.extra.load()
        inner = extra.pop("function", {})
        call["function"] = {"name": self.name, "arguments": self.arguments, **inner}
        return {**call, **extra}


@dataclass(frozen=True, slots=True)
class Message:
    """One message. Made by `parse_messages`; never changes.

    `content` is text, a tuple of frozen parts (objects with a `type`; images and the like are
    kept as they are), or None (an assistant message that only calls tools). `extra` holds the
    fields that have no meaning here; templates may show them. `metadata` holds those of
    `METADATA_FIELDS`, which no template gets, and under `form` which of two usual forms the caller
    used, so that `to_openai` can use it too.

    `content_hash` covers what a model is shown: not the ids, the metadata, extra fields that are
    null, fields of calls beside name and arguments, nor fields of text parts beside the text. A
    list of one text part counts as that text, and no content as an empty one. Equality covers
    everything.
    """

    role: str
    content: str | tuple[FrozenJson, ...] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    id: str | None = None
    extra: FrozenJson = NO_EXTRA
    metadata: FrozenJson = NO_EXTRA
    content_hash: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "content_hash", _content_hash(self))

    def __hash__(self) -> int:
        return hash(self.content_hash)  # a text keeps its hash; equal messages have equal ones

    @property
    def text(self) -> str:
        """The content as one text: parts of type text joined by newlines, other parts left out."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts = (part_text(part.load()) for part in self.content)
        return "\n".join(text for text in texts if text is not None)

    def with_content(self, content: str | tuple[FrozenJson, ...] | None) -> Message:
        """The message with another content and without metadata, which belongs to the old one.

        Metadata may even repeat the old content, as the artifact of a tool does.
        """
        return replace(self, content=content, metadata=NO_EXTRA)

    def to_openai(self) -> dict[str, Any]:
        """The message as a fresh dict in OpenAI form, from which `parse_messages` makes it again.

        Beside OpenAI's fields it has `reasoning`, `id`, the extra fields and the metadata, where
        there are any. Arguments of calls are an object if they were given as one.
        """
        metadata = self.metadata.load()
        form = metadata.pop("form", {})
        message: dict[str, Any] = {"role": self.role}
        if self.content is None or isinstance(self.content, str):
            message["content"] = self.content
        else:
            message["content"] = [part.load() for part in self.content]
        if self.reasoning is not None:
            message |= dict.fromkeys(form.get("reasoning", ("reasoning",)), self.reasoning)
        for key in ("name", "tool_call_id", "id"):
            value = getattr(self, key)
            if value is not None:
                message[key] = value
        calls = [call.to_openai() for call in self.tool_calls]
        if form.get("calls") == "function_call" and len(calls) == 1 and "id" not in calls[0]:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        return {**message, **self.extra.load(), **metadata}


def part_text(part: Mapping[str, Any]) -> str | None:
    """The text of a part of content, None if it has none; several APIs have names for it."""
    text = part.get("refusal" if part.get("type") == "refusal" else "text")
    return text if part.get("type") in TEXT_PARTS and isinstance(text, str) else None


def _content_hash(message: Message) -> str:
    """Hash of what the message says. Key order counts, and so does the form of arguments."""
    content: Any = message.content or ""
    if isinstance(content, tuple):
        content = [_said(part) for part in content]
        if len(content) == 1 and isinstance(content[0], str):
            content = content[0]
    extra = message.extra.text
    if message.extra != NO_EXTRA:
        # SDKs write out fields without a value, and other programs leave them out.
        values = {key: value for key, value in message.extra.load().items() if value is not None}
        extra = to_json(values)
    canonical = [
        message.role,
        content if isinstance(content, list) else None,
        message.name,
        message.reasoning or None,
        [[call.name, call.raw, call.arguments_json] for call in message.tool_calls],
        extra,
    ]
    # A text, which may be long, goes behind the first line as it is.
    text = content if isinstance(content, str) else ""
    serialised = f"{to_json(canonical)}\n{text}".encode("utf-8", "surrogatepass")
    return blake2b(serialised, digest_size=16).hexdigest()


def _said(part: FrozenJson) -> str | dict[str, Any]:
    """What a part of content says: its text, or what is no text without marks for caches."""
    value = part.load()
    text = part_text(value)
    if text is not None:
        return text
    return {key: item for key, item in value.items() if key != "cache_control"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with the tool schemas that are shown to the model."""

    messages: tuple[Message, ...]
    tools: tuple[FrozenJson, ...] = ()
