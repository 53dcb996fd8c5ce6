"""Marks on messages that tell which edit put them in the place of others.

A mark travels in `response_metadata`, which no model is shown and no hash covers, so that whoever
sees the messages next can declare the edit: a tracked node, or a chat model.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

from langchain_core.messages import BaseMessage

from patchkv_agents.context import Edit, EditKind
from patchkv_agents.context.sequences import equal_ends

FIELD = "patchkv_edit"
"""The field of `response_metadata` that holds the mark."""

_KINDS = frozenset(map(str, EditKind))

AnyMessageT = TypeVar("AnyMessageT", bound=BaseMessage)


@dataclass(frozen=True, slots=True)
class EditMark:
    """Says by whom and how a message came to its present content.

    Attributes:
        kind: what was done; None if the mark does not say.
        author: the tool or node that did it.
        key: tells this edit from others of the same message, such as the id of the tool call.
        reason: in the author's words.
    """

    kind: EditKind | None = None
    author: str | None = None
    key: str | None = None
    reason: str | None = None


def edit_kind(kind: EditKind | str) -> EditKind:
    """The kind of this name.

    Raises:
        ContextError: there is none.
    """
    return Edit.declare(cast(EditKind, kind)).kind


def marked(message: AnyMessageT, mark: EditMark) -> AnyMessageT:
    """A copy of the message with the mark."""
    said = {name: value for name, value in asdict(mark).items() if value is not None}
    if mark.kind is not None:
        said["kind"] = str(mark.kind)
    metadata = {**message.response_metadata, FIELD: said}
    return message.model_copy(update={"response_metadata": metadata})


def mark_of(message: BaseMessage) -> EditMark | None:
    """The mark of a message; None if it has none.

    Any program may write it: an object with `kind`, `author`, `key` and `reason`, each of them
    optional. What is no text, and a kind that there is not, counts as left out.
    """
    found: Any = message.response_metadata.get(FIELD)
    if not isinstance(found, Mapping):
        return None
    said = (found.get(name) for name in ("kind", "author", "key", "reason"))
    kind, *texts = (each if isinstance(each, str) else None for each in said)
    mark = EditMark(EditKind(kind) if kind in _KINDS else None, *texts)
    return None if mark == EditMark() else mark


def marked_edits(
    before: Sequence[BaseMessage], after: Sequence[BaseMessage], *, author: str | None = None
) -> tuple[Edit, ...]:
    """Declared edits for the marks in `after` on messages that `before` had otherwise.

    Messages are told by their ids. One whose mark `before` had already is no new edit.

    Args:
        before: the old messages.
        after: the new messages.
        author: given to edits whose mark names none.
    """
    head, tail = equal_ends(before, after, operator.is_)
    before, after = before[head : len(before) - tail], after[head : len(after) - tail]
    old = {message.id: message for message in before if message.id is not None}
    edits = []
    for message in after:
        earlier = None if message.id is None else old.get(message.id)
        if earlier is None or earlier is message or message.id is None:
            continue
        mark = mark_of(message)
        if mark is None or mark.kind is None or mark == mark_of(earlier):
            continue
        if message.content == earlier.content:
            continue
        edits.append(
            Edit.declare(
                mark.kind,
                message_ids=(message.id,),
                author=mark.author or author,
                idempotency_key=f"{message.id}:{mark.key}" if mark.key else None,
            )
        )
    return tuple(edits)
