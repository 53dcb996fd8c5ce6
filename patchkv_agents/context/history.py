"""The history of a context: every change is a new version, linked to the one before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace as changed
from threading import RLock
from typing import Any

from patchkv_agents.context.edits import Edit, EditKind, reconcile
from patchkv_agents.context.frozen import FrozenJson, IdSource
from patchkv_agents.context.inference import infer_edits
from patchkv_agents.context.messages import Message
from patchkv_agents.context.parsing import (
    parse_content,
    parse_messages,
    parse_template_args,
    parse_tools,
)
from patchkv_agents.context.versions import ContextVersion
from patchkv_agents.errors import ContextError


class ContextHistory:
    """Versions of one context, from the first to the present one (`head`).

    What is passed in is copied; versions never change. Equal messages are stored once. Safe to
    use from several threads.

    Args:
        clock_ns: nanoseconds since the epoch, for ids and times.
    """

    def __init__(self, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._ids = IdSource(clock_ns)
        self._lock = RLock()
        self._versions: dict[str, ContextVersion] = {}
        self._messages: dict[Message, Message] = {}
        self._head: ContextVersion | None = None

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, version_id: object) -> bool:
        return version_id in self._versions

    @property
    def head(self) -> ContextVersion | None:
        """The present version; None before the first commit."""
        return self._head

    def copy(self) -> ContextHistory:
        """A history of its own with the same versions so far; versions and messages are shared."""
        with self._lock:
            other = ContextHistory(clock_ns=self._clock_ns)
            other._versions, other._messages = dict(self._versions), dict(self._messages)
            other._head = self._head
            return other

    def commit(
        self,
        messages: Sequence[Mapping[str, Any] | Message],
        *,
        tools: Iterable[Mapping[str, Any] | FrozenJson] | None = None,
        template_args: Mapping[str, Any] | FrozenJson | None = None,
        edits: Iterable[Edit] | None = None,
        author: str | None = None,
    ) -> ContextVersion:
        """Make the given context the present version.

        Args:
            messages: the whole list, as for `parse_messages`.
            tools: the tool schemas; none if left out, whatever the version before had.
            template_args: arguments of the chat template; none if left out.
            edits: edits that the caller declares (`Edit.declare`). All others are inferred; what
                really changed decides about messages and hashes.
            author: who made the change (a tool, node or middleware); given to edits without one.

        Returns:
            The new version, or the present one if nothing differs from it (declared edits are
            then without effect).

        Raises:
            ContextError: something has the wrong shape.
        """
        parsed = parse_messages(messages)
        parsed_tools = parse_tools(tools)
        arguments = parse_template_args(template_args)
        with self._lock:
            return self._commit(parsed, parsed_tools, arguments, tuple(edits or ()), author)

    def replace(
        self,
        target: int | str,
        content: str | Sequence[Any] | None,
        *,
        kind: EditKind = EditKind.REPLACE_TOOL_RESULT,
        author: str | None = None,
        forget: bool = False,
    ) -> ContextVersion:
        """Give one message of the present version another content: a declared edit.

        Args:
            target: the message's index (from 0), its id, or the tool_call_id it answers.
            content: the new content, in any form that a message's content may have.
            kind: what the change is. The default is for tool messages only.
            author: who made the change.
            forget: nothing computed from the old content may survive.

        Returns:
            The new version, or the present one if the content is the same.

        Raises:
            ContextError: there is no such message, or several; or the kind does not fit it.
        """
        with self._lock:
            head = self._present()
            index = _find(head.messages, target)
            message = head.messages[index]
            if kind is EditKind.REPLACE_TOOL_RESULT and message.role not in ("tool", "function"):
                raise ContextError(
                    f"Message {index} is a {message.role} message, not a tool result; "
                    "pass kind=EditKind... to say what the change is."
                )
            if content is None and message.role != "assistant":
                raise ContextError(
                    f"Message {index} ({message.role}) needs content; pass '' to empty it."
                )
            messages = list(head.messages)
            messages[index] = changed(message, content=parse_content(content, index))
            edit = Edit.declare(kind, old=(index,), new=(index,), author=author, forget=forget)
            return self._commit(tuple(messages), head.tools, head.template_args, (edit,), author)

    def log(self) -> tuple[ContextVersion, ...]:
        """The present version and those it came from (first parents), newest first."""
        with self._lock:
            versions = []
            version = self._head
            while version is not None:
                versions.append(version)
                version = self._versions[version.parents[0]] if version.parents else None
            return tuple(versions)

    def get(self, version_id: str) -> ContextVersion:
        """The version of that id.

        Raises:
            ContextError: there is none.
        """
        try:
            return self._versions[version_id]
        except KeyError:
            last = f"the present one is {self._head.id!r}" if self._head else "the history is empty"
            raise ContextError(
                f"There is no version {version_id!r} among {len(self)} ({last}); see log()."
            ) from None

    def diff(self, old: str | ContextVersion, new: str | ContextVersion) -> tuple[Edit, ...]:
        """The edits that lead from one version to another, whether or not one follows the other.

        Raises:
            ContextError: an id is not known.
        """
        return infer_edits(self._resolve(old), self._resolve(new))

    def _resolve(self, version: str | ContextVersion) -> ContextVersion:
        return self.get(version) if isinstance(version, str) else version

    def _present(self) -> ContextVersion:
        if self._head is None:
            raise ContextError("The history is empty; commit messages first.")
        return self._head

    def _commit(
        self,
        messages: tuple[Message, ...],
        tools: tuple[FrozenJson, ...],
        template_args: FrozenJson,
        declared: tuple[Edit, ...],
        author: str | None,
    ) -> ContextVersion:
        head = self._head
        # Equal messages become one object, so that versions differ in memory only by what changed.
        messages = tuple(self._messages.setdefault(message, message) for message in messages)
        if head is not None and (messages, tools, template_args) == (
            head.messages,
            head.tools,
            head.template_args,
        ):
            return head
        version = ContextVersion(
            id=self._ids.next(),
            messages=messages,
            tools=tools,
            template_args=template_args,
            parents=(head.id,) if head else (),
            author=author,
            time_s=self._clock_ns() / 1e9,
        )
        if head is not None:
            edits = reconcile(declared, infer_edits(head, version))
            version = changed(version, edits=tuple(_with_author(edit, author) for edit in edits))
        self._versions[version.id] = version
        self._head = version
        return version


def _with_author(edit: Edit, author: str | None) -> Edit:
    return edit if edit.author or author is None else changed(edit, author=author)


def _find(messages: Sequence[Message], target: int | str) -> int:
    """Index of the message that `target` names."""
    if isinstance(target, bool) or not isinstance(target, int | str):
        raise ContextError(f"Name a message by index, id or tool_call_id, not by {target!r}.")
    if isinstance(target, int):
        if not 0 <= target < len(messages):
            raise ContextError(
                f"There is no message {target}; this version has {len(messages)}, from 0."
            )
        return target
    found = [
        index
        for index, message in enumerate(messages)
        if target in (message.id, message.tool_call_id)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise ContextError(
            f"{target!r} names messages {', '.join(map(str, found))}; pass one of these indices."
        )
    names = [name for m in messages for name in (m.id, m.tool_call_id) if name]
    shown = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
    raise ContextError(
        f"No message has id or tool_call_id {target!r}. "
        + (f"There are {shown}." if names else f"None has one; use an index below {len(messages)}.")
    )
