"""Conversations that a template refuses: calls and results that do not belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from patchkv_agents.context.messages import Message

_RESULTS = ("tool", "function")


def paired(messages: Sequence[Message]) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The messages with calls and results as text where one lacks the other; and what was done.

    Clients cut their histories, and agents end between a call and its result. Each message keeps
    its index. The calls of the last message wait for their results.
    """
    result = list(messages)
    notes = []
    caller: int | None = None  # index of the message whose calls may be answered
    answered: set[int] = set()
    for index, message in enumerate(messages):
        if message.role in _RESULTS:
            if caller is not None and _answers(message, messages[caller]):
                answered.add(caller)
                continue
            result[index] = replace(
                message,
                role="user",
                content=f"Result of a tool: {message.text}",
                tool_call_id=None,
                name=None,
            )
            notes.append(f"message {index}: a result without its call is shown as text")
        else:
            caller = index if message.tool_calls else None
    for index, message in enumerate(messages[:-1]):
        if message.tool_calls and index not in answered:
            calls = "\n".join(f"{c.name}({c.arguments_json})" for c in message.tool_calls)
            text = "\n".join(filter(None, (message.text, f"Called without a result: {calls}")))
            result[index] = replace(message, content=text, tool_calls=())
            notes.append(f"message {index}: calls without their results are shown as text")
    return tuple(result), tuple(notes)


def _answers(result: Message, caller: Message) -> bool:
    ids = {call.id for call in caller.tool_calls}
    return result.tool_call_id is None or result.tool_call_id in ids or ids == {None}
