"""Values of LangChain messages as a history can store them, whatever a program put into them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from patchkv_agents.context import Message, from_langchain
from patchkv_agents.context.frozen import MAX_DEPTH
from patchkv_agents.errors import ContextError

_MAX_NESTING = MAX_DEPTH - 10


def recordable(message: BaseMessage) -> tuple[Message, str | None]:
    """The value of a message, and what is wrong with it where it cannot be stored as it is.

    What has no place in a history is replaced: lone surrogates by U+FFFD, numbers that are not
    finite and objects by their text, sets by lists, an unknown role by `user` with the role as the
    name. A call without a name becomes an invalid call.
    """
    try:
        return from_langchain([message], keep="shown")[0], None
    except ContextError as error:
        problem = str(error).removeprefix("Message 0: ").removeprefix("Message 0, ")
    try:
        return from_langchain([_cleaned(message)], keep="shown")[0], problem
    except ContextError:
        text = HumanMessage(_plain(str(message.content)), id=_plain(message.id))
        return from_langchain([text], keep="shown")[0], problem


def without_repeated_ids(messages: Sequence[Message]) -> tuple[tuple[Message, ...], str | None]:
    """The messages with each id once: later messages of the same id lose it."""
    seen: set[str] = set()
    result = list(messages)
    problem = None
    for index, message in enumerate(messages):
        if message.id is None:
            continue
        if message.id in seen:
            result[index] = replace(message, id=None)
            problem = f"message {index} has the id {message.id!r} of an earlier one"
        seen.add(message.id)
    return tuple(result), problem


def plain_text(text: str) -> str:
    """The text with U+FFFD in place of lone surrogates."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _cleaned(message: BaseMessage) -> BaseMessage:
    changes = {
        "content": _plain(message.content),
        "name": _plain(message.name),
        "id": _plain(message.id),
        "additional_kwargs": _plain(message.additional_kwargs),
    }
    if isinstance(message, AIMessage):
        calls = [_plain(dict(call)) for call in message.tool_calls]
        changes["tool_calls"] = [call for call in calls if call["name"]]
        changes["invalid_tool_calls"] = [
            *(_plain(dict(call)) for call in message.invalid_tool_calls),
            *(
                {**call, "type": "invalid_tool_call", "args": str(call["args"]), "error": None}
                for call in calls
                if not call["name"]
            ),
        ]
    if hasattr(message, "tool_call_id"):
        changes["tool_call_id"] = _plain(message.tool_call_id)
    cleaned = message.model_copy(update=changes)
    try:
        from_langchain([cleaned], keep="shown")
    except ContextError:
        role = str(getattr(message, "role", message.type))
        kwargs = {} if message.name is None and role == "human" else {"name": _plain(role)}
        return HumanMessage(cleaned.content, id=cleaned.id, **kwargs)
    return cleaned


def _plain(value: Any, depth: int = 0) -> Any:
    """A JSON value that says nearly the same."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth > _MAX_NESTING:
        return "..."
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((_plain(item, depth + 1) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return _plain(str(value))
