"""Converts the messages of a state, each one once for as long as it does not change."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

from langchain_core.messages import BaseMessage

from patchkv_agents.context import Message
from patchkv_langgraph.recordable import recordable, without_repeated_ids

# What `from_langchain(keep="shown")` leaves out; an artifact may be any object.
_NOT_SHOWN = frozenset(("response_metadata", "usage_metadata", "artifact", "status"))
# Without references between equal objects, so that equal values have equal bytes.
_BY_VALUE = 2

_Key = tuple[type[BaseMessage], str, bytes]
_Value = tuple[Message, str | None]


class Snapshots:
    """Values of LangChain messages, of what a model is shown of them.

    Programs change messages in place, so that an object says nothing: each call compares what the
    messages hold (order of keys and types of numbers included) with what was converted before. That
    takes about a microsecond a message, a conversion 35. What the last call saw is cached.

    Safe to use from several threads, without a lock: the cache is replaced as a whole.
    """

    def __init__(self) -> None:
        self._cache: dict[_Key, _Value] = {}

    def take(self, messages: Sequence[BaseMessage]) -> tuple[tuple[Message, ...], list[str]]:
        """The values of messages, and what of them had to be replaced (see `recordable`)."""
        cache, seen = self._cache, {}
        values, problems, ids = [], [], []
        for index, message in enumerate(messages):
            key = _key(message)
            value = cache.get(key) if key is not None else None
            if value is None:
                value = recordable(message)
            if key is not None:
                seen[key] = value
            if value[1] is not None:
                problems.append(f"message {index}: {value[1]}")
            values.append(value[0])
            if value[0].id is not None:
                ids.append(value[0].id)
        self._cache = seen
        taken = tuple(values)
        if len(set(ids)) < len(ids):
            taken, problem = without_repeated_ids(taken)
            problems += [problem] if problem else []
        return taken, problems


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
