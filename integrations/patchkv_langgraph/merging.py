"""Predicts the state of a key after a step, as LangGraph merges the updates of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any

from langgraph.channels.base import BaseChannel
from langgraph.channels.binop import BinaryOperatorAggregate
from langgraph.types import Overwrite

from patchkv_agents.errors import ContextError
from patchkv_langgraph.tasks import Reducer


def merged(
    value: Any,
    updates: Sequence[Any],
    channel: BaseChannel[Any, Any, Any] | None,
    reducer: Reducer | None = None,
) -> Any:
    """The value of a key after the updates of one step.

    Neither `value` nor an update is changed, except that LangGraph's `add_messages` gives messages
    without an id one, as it does when the graph runs it.

    Args:
        value: at the beginning of the step.
        updates: in the order in which LangGraph applies them.
        channel: of the key; tells how the graph merges.
        reducer: merges where there is no channel; the last update counts if it is left out too.

    Raises:
        ContextError: an update can only be read once.
    """
    if any(isinstance(update, Iterator) for update in updates):
        raise ContextError("An update is an iterator, which can only be read once; pass a list.")
    for update in updates:
        is_overwrite, new = overwriting(update)
        if is_overwrite:
            return new
    takes_all: Callable[[Any, list[Any]], Any] | None = getattr(channel, "reducer", None)
    if takes_all is not None:
        return takes_all(_own(value), [_own(update) for update in updates])
    if isinstance(channel, BinaryOperatorAggregate):
        reducer = channel.operator
    elif channel is not None and not hasattr(channel, "value"):  # of a class that is not known
        own = channel.copy()
        own.update([_own(update) for update in updates])
        return own.get()
    elif channel is not None:
        reducer = None
    for update in updates:
        value = update if reducer is None or value is None else reducer(_own(value), _own(update))
    return value


def overwriting(update: Any) -> tuple[bool, Any]:
    """Whether an update takes the place of everything else in its step, and its value."""
    if isinstance(update, Overwrite):
        return True, update.value
    if isinstance(update, Mapping) and update.keys() == {"__overwrite__"}:
        return True, update["__overwrite__"]
    return False, None


def _own(value: Any) -> Any:
    """A copy that a reducer may change. Messages are shared: they are many, and reducers new."""
    if isinstance(value, list):
        return list(value)
    if isinstance(value, dict | set):
        try:
            return deepcopy(value)
        except Exception:
            return copy(value)
    return value
