"""Converts the messages of a state, each one once for as long as it does not change."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from patchkv_agents.context import Message
from patchkv_langgraph.recordable import recordable, without_repeated_ids

# What `from_langchain(keep="shown")` leaves out; an artifact may be any object.
_NOT_SHOWN = frozenset(("response_metadata", "usage_metadata", "artifact", "status"))
# Without references between equal objects, so that equal values have equal bytes.
_BY_VALUE = 2

_Key = tuple[str | None, ...] | tuple[type[BaseMessage], str, bytes]
_Value = tuple[Message, str | None]


class _Taken(NamedTuple):
    """What one call saw, and what it returned."""

    cache: dict[_Key | None, _Value]
    entries: list[_Value]
    values: tuple[Message, ...]
    problems: list[str]


class Snapshots:
    """Values of LangChain messages, of what a model is shown of them.

    Programs change messages in place, so that an object says nothing: each call compares what the
    messages hold (order of keys and types of numbers included) with what was converted before. That
    takes about a microsecond a message, a conversion 35. What the last call saw is cached.

    Safe to use from several threads, without a lock: the cache is replaced as a whole.
    """

    def __init__(self) -> None:
        self._last = _Taken({}, [], (), [])

    def take(self, messages: Sequence[BaseMessage]) -> tuple[tuple[Message, ...], list[str]]:
        """The values of messages, and what of them had to be replaced (see `recordable`)."""
        last = self._last
        keys = [_key(message) for message in messages]
        try:
            entries = [last.cache[key] for key in keys]
        except KeyError:
            entries = [
                last.cache.get(key) or recordable(message)
                for key, message in zip(keys, messages, strict=True)
            ]
        if entries == last.entries:
            return last.values, last.problems
        seen: dict[_Key | None, _Value] = dict(zip(keys, entries, strict=True))
        seen.pop(None, None)
        problems = [f"message {i}: {each[1]}" for i, each in enumerate(entries) if each[1]]
        values = tuple([each[0] for each in entries])
        ids = [value.id for value in values if value.id is not None]
        if len(set(ids)) < len(ids):
            values, problem = without_repeated_ids(values)
            problems += [problem] if problem else []
        self._last = _Taken(seen, entries, values, problems)
        return values, problems


def _key(message: BaseMessage) -> _Key | None:
    """What a message holds; None if it holds objects that have no plain value."""
    kind, text, values = type(message), message.content, message.__dict__
    if kind in _SIMPLE and type(text) is str and not values["additional_kwargs"]:
        # Most messages: text, and nothing that has parts.
        calls = kind is AIMessage and (values.get("tool_calls") or values.get("invalid_tool_calls"))
        if not calls and not message.__pydantic_extra__:
            return _SIMPLE[kind], text, values["name"], values["id"], values.get("tool_call_id")
    parts = None
    if type(text) is not str:  # a text keeps its hash, so that it is not computed again
        text, parts = "", text
    fields = _FIELDS.get(kind) or _fields(kind)
    try:
        rest = (fields(values), message.__pydantic_extra__, parts)
        return kind, text, marshal.dumps(rest, _BY_VALUE)
    except (KeyError, ValueError):
        return None


_SIMPLE: dict[type[BaseMessage], str] = {
    kind: kind.__name__ for kind in (AIMessage, HumanMessage, SystemMessage, ToolMessage)
}
"""Types without fields that hold other values, besides the additional ones and calls."""

_FIELDS: dict[type[BaseMessage], Callable[[dict[str, Any]], Any]] = {}
"""Takes what counts out of the fields of a message of a type, besides its content."""


def _fields(kind: type[BaseMessage]) -> Callable[[dict[str, Any]], Any]:
    names = sorted(kind.model_fields.keys() - _NOT_SHOWN - {"content"})
    return _FIELDS.setdefault(kind, itemgetter(*names))
