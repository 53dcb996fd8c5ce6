"""Tracked operations: changes of the newest version that declare their edits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from patchkv_agents.context.edits import Edit, EditKind
from patchkv_agents.context.messages import Message
from patchkv_agents.context.parsing import parse_content, parse_messages
from patchkv_agents.context.versioning.scrubbing import REMOVED, Scrubber, emptied
from patchkv_agents.context.versioning.targets import Target, find
from patchkv_agents.context.versions import ContextVersion
from patchkv_agents.errors import ContextError


@dataclass(frozen=True, slots=True)
class Change:
    """A new list of messages, with its declared edits.

    Attributes:
        messages: the list.
        edits: declared edits.
        scrubber: removes secrets, also from earlier versions where an edit has `forget`.
        targets: messages whose earlier forms are to be forgotten, as indices into the present
            version; None: those that edits with `forget` name.
        like: gives the tool schemas and template arguments; None: the present version.
    """

    messages: Sequence[Message]
    edits: tuple[Edit, ...] = ()
    scrubber: Scrubber = Scrubber()
    targets: frozenset[int] | None = None
    like: ContextVersion | None = None


class TrackedOperations(ABC):
    """The operations of a history that change single messages.

    Each commits and returns a new version with a declared edit, or returns the current version if
    nothing changes. Each raises `ContextError` if there is no such message, if a name is ambiguous,
    or if the result is malformed; and `ConflictError` if another writer has advanced the branch, so
    that an index could mean another message.
    """

    @abstractmethod
    def _apply(
        self, make: Callable[[ContextVersion], Change], author: str | None
    ) -> ContextVersion:
        """Commit the change that `make` derives from the current version."""

    def replace(
        self,
        target: Target,
        content: str | Sequence[Any] | None,
        *,
        kind: EditKind = EditKind.REPLACE_TOOL_RESULT,
        author: str | None = None,
        forget: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> ContextVersion:
        """Replace the content of one message.

        Args:
            target: the message's index (from 0), its id, or the tool_call_id it answers.
            content: the new content, in any form that a message's content may have.
            kind: what the change is. The default is for tool messages only.
            author: who made the change.
            forget: remove the old content from all versions; nothing computed from it may survive.
            metadata: an object to keep with the edit.
        """

        def make(version: ContextVersion) -> Change:
            index = find(version.messages, target)
            message = version.messages[index]
            if kind == EditKind.REPLACE_TOOL_RESULT and message.role not in ("tool", "function"):
                raise ContextError(
                    f"Message {index} is a {message.role} message, not a tool result; "
                    "pass kind=EditKind... to say what the change is."
                )
            if content is None and message.role != "assistant":
                raise ContextError(
                    f"Message {index} ({message.role}) needs content; pass '' to empty it."
                )
            messages = list(version.messages)
            messages[index] = message.with_content(parse_content(content, index))
            edit = Edit.declare(
                kind, old=(index,), new=(index,), forget=forget, metadata=metadata, author=author
            )
            return Change(messages, (edit,))

        return self._apply(make, author)

    def revise(
        self, target: Target, content: str | Sequence[Any], *, author: str | None = None
    ) -> ContextVersion:
        """Replace the content of the message that holds the agent's plan."""
        return self.replace(target, content, kind=EditKind.REVISE_PLAN, author=author)

    def summarize(
        self,
        targets: range | Iterable[Target],
        summary: str | Mapping[str, Any] | Message,
        *,
        author: str | None = None,
    ) -> ContextVersion:
        """Replace several consecutive messages by one.

        Args:
            targets: the messages, as a range of indices or one by one.
            summary: the new message; a text becomes a user message.
            author: who made the change.
        """

        def make(version: ContextVersion) -> Change:
            indices = _indices(version, targets)
            if indices != list(range(indices[0], indices[-1] + 1)):
                raise ContextError(
                    f"Messages {', '.join(map(str, indices))} do not follow each other; summarise "
                    "each row of messages by itself, or delete the others."
                )
            given = {"role": "user", "content": summary} if isinstance(summary, str) else summary
            start, stop = indices[0], indices[-1] + 1
            messages = [*version.messages[:start], *parse_messages([given])]
            messages += version.messages[stop:]
            edit = Edit.declare(EditKind.SUMMARIZE, old=indices, new=(start,), author=author)
            return Change(messages, (edit,))

        return self._apply(make, author)

    def delete(
        self,
        targets: Target | Iterable[Target],
        *,
        author: str | None = None,
        forget: bool = False,
    ) -> ContextVersion:
        """Delete messages.

        Args:
            targets: the message, or several.
            author: who made the change.
            forget: remove them from all versions; nothing computed from them may survive.
        """

        def make(version: ContextVersion) -> Change:
            gone = _indices(version, targets)
            messages = [m for i, m in enumerate(version.messages) if i not in set(gone)]
            edits = (
                Edit.declare(EditKind.DELETE, old=(i,), author=author, forget=forget) for i in gone
            )
            return Change(messages, tuple(edits))

        return self._apply(make, author)

    def insert(
        self, before: Target, message: Mapping[str, Any] | Message, *, author: str | None = None
    ) -> ContextVersion:
        """Insert a message before another one; the number of messages as the place appends it."""

        def make(version: ContextVersion) -> Change:
            count = len(version.messages)
            place = count if before == count else find(version.messages, before)
            messages = list(version.messages)
            messages[place:place] = parse_messages([message])
            kind = EditKind.APPEND if place == count else EditKind.INSERT
            return Change(messages, (Edit.declare(kind, new=(place,), author=author),))

        return self._apply(make, author)

    def move(self, target: Target, to: int, *, author: str | None = None) -> ContextVersion:
        """Move a message to the index `to`, counted when it is there."""

        def make(version: ContextVersion) -> Change:
            index, place = find(version.messages, target), find(version.messages, to)
            messages = list(version.messages)
            messages.insert(place, messages.pop(index))
            edit = Edit.declare(EditKind.MOVE, old=(index,), new=(place,), author=author)
            return Change(messages, (edit,))

        return self._apply(make, author)

    def redact(
        self,
        targets: Target | Iterable[Target] = (),
        replacement: str = REMOVED,
        *,
        forget: bool = True,
        secrets: Iterable[str] = (),
        author: str | None = None,
    ) -> ContextVersion:
        """Remove text that should not have been there.

        The messages named get `replacement` as their content and lose reasoning, arguments of
        calls and other fields. All other messages lose each secret, which becomes `[removed]`.

        With `forget`, the text is removed from every version and branch of the thread, from its
        forks in the same store, and from the store's files. The new version's `forgotten` records
        what was removed and which versions' KV state has seen it. See
        `patchkv_agents.context.versioning.forgetting` for what is removed. Versions in a program's
        memory and copies of the file are out of reach.

        Args:
            targets: the messages; may be left out if there are secrets.
            replacement: what the messages say instead.
            forget: whether to remove the text from the past as well.
            secrets: texts of 4 characters or more, to be removed wherever they stand.
            author: who made the change.
        """
        scrubber = Scrubber.of(secrets)
        if scrubber.text(replacement) != replacement:
            raise ContextError("The replacement holds one of the secrets; choose another text.")

        def make(version: ContextVersion) -> Change:
            named = _indices(version, targets, optional=bool(scrubber.needles))
            messages = [scrubber.message(message) for message in version.messages]
            for index in named:
                messages[index] = emptied(messages[index]).with_content(replacement)
            touched = [i for i, m in enumerate(messages) if m != version.messages[i] or i in named]
            edits = [
                Edit.declare(EditKind.REDACT, old=(i,), new=(i,), author=author, forget=forget)
                for i in touched
            ]
            if forget and not edits:  # what is to be forgotten stands in earlier versions only
                edits = [Edit.declare(EditKind.REDACT, author=author, forget=True)]
            return Change(messages, tuple(edits), scrubber, frozenset(named))

        return self._apply(make, author)


def _indices(
    version: ContextVersion, targets: Target | Iterable[Target], *, optional: bool = False
) -> list[int]:
    """Sorted indices of the messages that are named, each once."""
    several = [targets] if isinstance(targets, int | str) else list(targets)
    if not several and not optional:
        raise ContextError("Name at least one message.")
    return sorted({find(version.messages, target) for target in several})
