"""Messages of a context: immutable values, equal only if everything in them is equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from patchkv_agents.context.frozen import FrozenJson, to_json

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

NO_EXTRA = FrozenJson("{}")


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
        """The arguments as a value, or the raw string where that is not valid JSON."""
        try:
            return json.loads(self.arguments_json)
        except (ValueError, RecursionError):
            return self.arguments_json

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
    fields that have no meaning here. `content_hash` covers everything but the ids.
    """

    role: str
    content: str | tuple[FrozenJson, ...] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    id: str | None = None
    extra: FrozenJson = NO_EXTRA
    content_hash: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "content_hash", _content_hash(self))

    @property
    def text(self) -> str:
        """The content as one text: parts of type text joined by newlines, other parts left out."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        parts = (part.load() for part in self.content)
        return "\n".join(part["text"] for part in parts if part.get("type") == "text")

    def to_openai(self) -> dict[str, Any]:
        """The message as a fresh dict in OpenAI form, from which `parse_messages` makes it again.

        Beside OpenAI's fields it has `reasoning`, `id` and the extra fields, where there are any.
        """
        message: dict[str, Any] = {"role": self.role}
        if self.content is None or isinstance(self.content, str):
            message["content"] = self.content
        else:
            message["content"] = [part.load() for part in self.content]
        for key in ("reasoning", "name", "tool_call_id", "id"):
            value = getattr(self, key)
            if value is not None:
                message[key] = value
        if self.tool_calls:
            message["tool_calls"] = [call.to_openai() for call in self.tool_calls]
        message.update(self.extra.load())
        return message


def _content_hash(message: Message) -> str:
    """Hash of what the message says. Key order counts, and so does the form of arguments."""
    content = message.content
    canonical = [
        message.role,
        [part.text for part in content] if isinstance(content, tuple) else content,
        message.name,
        message.reasoning,
        [
            [call.name, call.raw, call.arguments_json, call.extra.text]
            for call in message.tool_calls
        ],
        message.extra.text,
    ]
    serialised = to_json(canonical).encode("utf-8", "surrogatepass")
    return blake2b(serialised, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with the tool schemas that are shown to the model."""

    messages: tuple[Message, ...]
    tools: tuple[FrozenJson, ...] = ()
