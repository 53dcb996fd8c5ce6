"""Converts the messages of a state, each one once for as long as it does not change."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_messages

from patchkv_agents.context import Message, from_langchain
from patchkv_agents.errors import ContextError

# What `from_langchain(keep="shown")` leaves out; an artifact may be any object.
_NOT_SHOWN = frozenset(("response_metadata", "usage_metadata", "artifact", "status"))
# Without references between equal objects, so that equal values have equal bytes.
_BY_VALUE = 2

_Key = tuple[type[BaseMessage], str, bytes]


class Snapshots:
    """Values of LangChain messages, of what a model is shown of them.

    Programs change messages in place, so that an object says nothing: each call compares what the
    messages hold (order of keys and types of numbers included) with what was converted before. That
    takes about a microsecond a message, a conversion 35. What the last call saw is kept.
    """

    def __init__(self) -> None:
        self._known: dict[_Key, Message] = {}

    def take(self, messages: Sequence[Any]) -> tuple[Message, ...]:
        """The values of `messages`, which may also be of any form that LangChain converts.

        Raises:
            ContextError: a message cannot be converted; it is named by its index.
        """
        if not all(isinstance(message, BaseMessage) for message in messages):
            messages = convert_to_messages(messages)
        known, seen = self._known, {}
        values = []
        for message in messages:
            key = _key(message)
            value = known.get(key) if key is not None else None
            if value is None:
                value = _converted(message, messages)
            if key is not None:
                seen[key] = value
            values.append(value)
        self._known = seen
        return tuple(values)


def _converted(message: BaseMessage, messages: Sequence[BaseMessage]) -> Message:
    try:
        return from_langchain([message], keep="shown")[0]
    except ContextError:
        from_langchain(messages, keep="shown")  # fails too, and names the index
        raise


def _key(message: BaseMessage) -> _Key | None:
    """What a message holds; None if it holds objects that have no plain value."""
    text, parts = message.content, None
    if not isinstance(text, str):  # which keeps its hash, so that it is not computed again
        text, parts = "", text
    try:
        rest = (_fields(type(message))(message.__dict__), message.__pydantic_extra__, parts)
        return type(message), text, marshal.dumps(rest, _BY_VALUE)
    except (KeyError, ValueError):
        return None


@cache
def _fields(kind: type[BaseMessage]) -> Callable[[dict[str, Any]], Any]:
    """Takes what counts out of the fields of a message, besides its content."""
    names = sorted(kind.model_fields.keys() - _NOT_SHOWN - {"content"})
    return itemgetter(*names)
