"""Context versions: immutable snapshots of what a model is shown."""

from __future__ import annotations

from dataclasses import dataclass

from patchkv_agents.context.edits import Edit
from patchkv_agents.context.frozen import FrozenJson
from patchkv_agents.context.messages import Message


@dataclass(frozen=True, slots=True)
class ContextVersion:
    """One version of a context.

    Attributes:
        id: unique, sorts by time of making, says nothing of the content.
        messages: the messages in order; equal ones are shared between versions.
        tools: the tool schemas, in the order in which they are shown.
        template_args: arguments of the chat template, such as `enable_thinking`.
        parents: ids of the versions it was made from; empty for the first one.
        edits: what changed since the first parent.
        author: who made it, if known.
        time_s: seconds since the epoch.
    """

    id: str
    messages: tuple[Message, ...]
    tools: tuple[FrozenJson, ...] = ()
    template_args: FrozenJson = FrozenJson("{}")
    parents: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    author: str | None = None
    time_s: float = 0.0
