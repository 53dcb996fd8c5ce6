"""A reducer for a state's messages that can run any number of times."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from langchain_core.messages import (
    BaseMessage,
    BaseMessageChunk,
    convert_to_messages,
    message_chunk_to_message,
)
from langgraph.graph.message import add_messages


def versioned_messages(left: Any, right: Any) -> list[BaseMessage]:
    """As LangGraph's `add_messages`, without side effects and with ids that stay the same.

    Used as `messages: Annotated[list[AnyMessage], versioned_messages]`. LangGraph may run a reducer
    more than once for the same update; `add_messages` gives messages without an id a new random one
    each time, and writes it into the caller's objects. Here the id is made from the message and its
    place, so that every run tells the same story, and nothing that is passed in changes.

    Args:
        left: the messages so far, or one.
        right: the update, or a single message; message-like values are converted.

    Raises:
        ValueError: the update removes a message that is not there.
    """
    old = _messages(left)
    new = _messages(right)
    taken = {message.id for message in (*old, *new)}
    old = _with_ids(old, 0, taken)
    new = _with_ids(new, len(old), taken)
    merged: list[BaseMessage] = add_messages(old, new)  # type: ignore[arg-type,assignment]
    return merged


def _messages(value: Any) -> list[BaseMessage]:
    values = value if isinstance(value, list) else [value]  # a pair of role and text is one message
    if not all(isinstance(message, BaseMessage) for message in values):
        values = convert_to_messages(values)
    return [
        message_chunk_to_message(message) if isinstance(message, BaseMessageChunk) else message
        for message in values
    ]


def _with_ids(
    messages: Iterable[BaseMessage], first: int, taken: set[str | None]
) -> list[BaseMessage]:
    """Copies of messages without an id get one; `taken` grows by them."""
    result = []
    for place, message in enumerate(messages, first):
        if message.id is None:
            message = message.model_copy(update={"id": _new_id(message, place, taken)})
            taken.add(message.id)
        result.append(message)
    return result


def _new_id(message: BaseMessage, place: int, taken: set[str | None]) -> str:
    """An id which is the same in each run, and unlike all others in the list."""
    says = repr((message.type, message.content, message.name, getattr(message, "tool_calls", ())))
    answers = getattr(message, "tool_call_id", "")
    for attempt in range(len(taken) + 1):
        text = f"{place}.{attempt}:{answers}:{says}"
        made = f"pkv-{blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=12).hexdigest()}"
        if made not in taken:
            return made
    raise RuntimeError("there are more attempts than ids that are taken")
