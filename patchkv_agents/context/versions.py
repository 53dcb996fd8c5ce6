"""Context versions: immutable snapshots of what a model is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from patchkv_agents.context.edits import Edit
from patchkv_agents.context.frozen import FrozenJson, check_text
from patchkv_agents.context.messages import Message
from patchkv_agents.errors import ContextError


@dataclass(frozen=True, slots=True, order=True)
class ThreadKey:
    """Names one line of work: a thread, and the part of it (such as a subagent) if it has parts.

    Raises:
        ContextError: a name is not text, or `thread` is empty.
    """

    thread: str
    namespace: str = ""

    def __post_init__(self) -> None:
        for name, value in (("thread", self.thread), ("namespace", self.namespace)):
            if not isinstance(value, str):
                raise ContextError(f"The {name} must be a string, not {value!r}.")
            check_text(value, f"The name of the {name}")
        if not self.thread:
            raise ContextError("The thread needs a name; '' is none.")

    def __str__(self) -> str:
        return f"{self.thread} ({self.namespace})" if self.namespace else self.thread


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a `forget` removed.

    Attributes:
        messages: how many distinct messages lost their text.
        versions: ids of all versions that contained it. KV state of these has seen it.
        threads: the threads that share these versions: this one, and forks of it.
        hashes: how many hashes and keys of edits were dropped because they would give it away.
        still_shown: messages of the new version that are forms of what was to be forgotten and
            were left, since the caller still shows them; indices.
        status: `"erased"`, or `"pending"` while the old text may still be in the store's files
            (another process reads them: see `ContextHistory.finish_forgetting`). As of when the
            version was read.
    """

    messages: int
    versions: tuple[str, ...]
    threads: tuple[ThreadKey, ...]
    hashes: int
    still_shown: tuple[int, ...] = ()
    status: Literal["erased", "pending"] = "erased"


@dataclass(frozen=True, slots=True)
class ContextVersion:
    """One version of a context.

    Attributes:
        id: unique, sorts by time of making, says nothing of the content.
        messages: the messages in order; equal ones are shared between versions.
        tools: the tool schemas, in the order in which they are shown.
        template_args: arguments of the chat template, such as `enable_thinking`.
        parents: ids of the versions it was made from; empty for the first one. Behind the first
            parent, those whose content was merged into it.
        edits: what changed since the first parent.
        author: who made it, if known.
        checkpoint_id: the agent framework's checkpoint that it belongs to, if any.
        forgotten: what was removed from all versions when this one was made, if something was.
        time_s: seconds since the epoch.
    """

    id: str
    messages: tuple[Message, ...]
    tools: tuple[FrozenJson, ...] = ()
    template_args: FrozenJson = FrozenJson("{}")
    parents: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    author: str | None = None
    checkpoint_id: str | None = None
    forgotten: Forgotten | None = None
    time_s: float = 0.0
