"""Message targets: looks up messages by index, id, or the tool_call_id they answer."""

from __future__ import annotations

from collections.abc import Sequence

from patchkv_agents.context.messages import Message
from patchkv_agents.errors import ContextError

Target = int | str
"""A message: its index (from 0), its id, or the tool_call_id that it answers."""


def find(messages: Sequence[Message], target: Target) -> int:
    """Index of the message that `target` names.

    Raises:
        ContextError: there is no such message, or several.
    """
    if isinstance(target, bool) or not isinstance(target, int | str):
        raise ContextError(f"Name a message by index, id or tool_call_id, not by {target!r}.")
    if isinstance(target, int):
        if not 0 <= target < len(messages):
            raise ContextError(
                f"There is no message {target}; this version has {len(messages)}, from 0."
            )
        return target
    matches = named(messages, target)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ContextError(
            f"{target!r} names messages {', '.join(map(str, matches))}; pass one of these indices."
        )
    names = [name for m in messages for name in (m.id, m.tool_call_id) if name]
    shown = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
    raise ContextError(
        f"No message has id or tool_call_id {target!r}. "
        + (f"There are {shown}." if names else f"None has one; use an index below {len(messages)}.")
    )


def named(messages: Sequence[Message], name: str) -> list[int]:
    """Indices of the messages that have `name` as their id or as the tool_call_id they answer."""
    return [i for i, message in enumerate(messages) if name in (message.id, message.tool_call_id)]
