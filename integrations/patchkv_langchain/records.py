"""Declared edits from notes and from what messages record.

What changed is found by comparing; notes and records only say whose doing it is and what it was
meant to be. So a record that does not fit names nothing, and never raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from patchkv_agents.context import (
    Edit,
    EditKind,
    Message,
    from_langchain,
    infer_edits,
    match_messages,
)
from patchkv_agents.context.versioning.declarations import is_possible
from patchkv_agents.errors import ContextError
from patchkv_langchain.notes import Note, names, note, noted, sign
from patchkv_langchain.sources import Claim, recorded

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

    from patchkv_agents.context.edits import EditPlace

_LOG = logging.getLogger(__name__)
_NOTHING = Claim()

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Change:
    """Edits that were found, seen as one, and what is said about them."""

    edits: tuple[Edit, ...]
    claim: Claim

    @property
    def old(self) -> tuple[int, ...]:
        """The old messages concerned."""
        return tuple(sorted({i for edit in self.edits for i in edit.old_indices}))

    @property
    def new(self) -> tuple[int, ...]:
        """The new messages concerned."""
        return tuple(sorted({j for edit in self.edits for j in edit.new_indices}))

    @property
    def partial(self) -> bool:
        """Whether only a part of the message changed."""
        return self.claim.partial or any(edit.partial for edit in self.edits)

    @property
    def kind(self) -> EditKind:
        """The claimed kind where it is possible, what was seen otherwise."""
        found = replace(self.edits[0], old_indices=self.old)
        said = self.claim.kind
        return said if said is not None and is_possible(said, found) else found.kind


def declared_edits(
    before: Sequence[Message],
    messages: Sequence[BaseMessage],
    *,
    shown: Sequence[Message] | None = None,
) -> tuple[Edit, ...]:
    """The edits from `before` to `messages` that somebody has noted or recorded.

    To be passed to `ContextHistory.commit` or `Thread.generate`, which find the others.

    Args:
        before: the version that the model saw last.
        messages: what it is shown now.
        shown: the same as our messages, where the caller has them already.

    Returns:
        An edit per change that has a note (see `patchkv_langchain.notes`) or a record (see
        `patchkv_langchain.sources`): with kind, author and place, and the reason in its metadata.
    """
    if not before:
        return ()
    try:
        after = from_langchain(messages, keep="shown") if shown is None else shown
        changes = find_changes(before, after, messages, noted())
        return tuple(
            Edit.declare(
                change.kind,
                old=change.old,
                new=change.new,
                where=change.claim.where,
                author=change.claim.author,
                partial=change.partial,
                metadata={"reason": change.claim.reason} if change.claim.reason else None,
            )
            for change in changes
            if change.claim != _NOTHING
        )
    except ContextError as error:
        _LOG.warning("edits are found by comparison alone: %s", error)
        return ()


def changes_between(
    before: Sequence[BaseMessage],
    after: Sequence[BaseMessage],
    *,
    author: str | None = None,
    kind: EditKind | None = None,
    where: EditPlace = "state",
) -> tuple[Note, ...]:
    """Notes of what `author` changed from one list to the other.

    Args:
        before: the messages as the author found them.
        after: as the author left them.
        author: who; where it is left out, what the messages record.
        kind: what it was meant to be; where it is left out, what the messages record.
        where: whether the program's state was changed, or the request alone.
    """
    before, after = _differing(before, after)
    if not before and not after:
        return ()
    try:
        old, new = from_langchain(before, keep="shown"), from_langchain(after, keep="shown")
        changes = find_changes(old, new, after)
    except ContextError as error:
        _LOG.warning("changes by %s are not noted: %s", author or "middleware", error)
        return ()
    return tuple(
        Note(
            frozenset(name for i in change.old for name in names(old[i])),
            frozenset(sign(new[j]) for j in change.new),
            author or change.claim.author,
            kind or change.claim.kind,
            change.claim.reason,
            where,
            change.partial,
        )
        for change in changes
    )


def tracked(
    transform: Callable[..., R],
    *,
    author: str | None = None,
    kind: EditKind | None = None,
) -> Callable[..., R]:
    """A function from messages to messages, such as `trim_messages`, that notes what it changes.

    The notes hold for model calls made later in the same context of execution (a script, or a
    node of a graph).

    Args:
        transform: takes the list of messages first and returns a list.
        author: its name if left out.
        kind: what its changes are meant to be; seen from the messages if left out.
    """
    name = author or getattr(transform, "__name__", type(transform).__name__)

    @wraps(transform)
    def noting(messages: Sequence[BaseMessage], *args: Any, **kwargs: Any) -> R:
        before = list(messages)
        result = transform(messages, *args, **kwargs)
        if isinstance(result, Sequence):
            note(changes_between(before, result, author=name, kind=kind, where="request"))
        return result

    return noting


def find_changes(
    before: Sequence[Message],
    after: Sequence[Message],
    natives: Sequence[BaseMessage],
    notes: Iterable[Note] = (),
) -> list[Change]:
    """All changes from `before` to `after`, with what notes and records say about them.

    Args:
        before: messages.
        after: messages.
        natives: `after` in LangChain's form.
        notes: who changed what; of several that fit, the last.
    """
    noted_changes = list(notes)
    changes = []
    for edit in infer_edits(before, after):
        old = before[edit.old_indices[0]] if edit.old_indices else None
        record = next((c for j in edit.new_indices if (c := recorded(natives[j], old))), None)
        changes.append(
            Change((edit,), _joined(_fitting(noted_changes, edit, before, after), record))
        )
    summaries = [
        change
        for change in changes
        if change.claim.kind is EditKind.SUMMARIZE and len(change.new) == 1
    ]
    for summary in summaries:
        if any(change is summary for change in changes):  # not a part of the one before
            changes = _with_summary(changes, summary, before, after)
    return changes


def _fitting(
    notes: Sequence[Note], edit: Edit, before: Sequence[Message], after: Sequence[Message]
) -> Note | None:
    """The last note whose outcome the edit has; else the last that removed what is gone.

    Where a message was removed and others were added, comparison may take one for the other.
    """
    added = {sign(after[j]) for j in edit.new_indices}
    removed = {name for i in edit.old_indices for name in names(before[i])}
    by_outcome = (each for each in reversed(notes) if each.added & added)
    by_removal = (
        each for each in reversed(notes) if each.removed & removed and not (each.added and added)
    )
    return next(chain(by_outcome, by_removal), None)


def _joined(said: Note | None, record: Claim | None) -> Claim:
    """Note and record of one change. Notes know names that users gave, records know reasons."""
    if said is None:
        return record or _NOTHING
    claim = record or _NOTHING
    return replace(
        claim,
        author=said.author or claim.author,
        kind=said.kind or claim.kind,
        reason=said.reason or claim.reason,
        where=said.where,
        partial=said.partial or claim.partial,
    )


def _with_summary(
    changes: Sequence[Change],
    summary: Change,
    before: Sequence[Message],
    after: Sequence[Message],
) -> list[Change]:
    """The changes with those that a summary stands for made one with it.

    These are the old messages between its neighbours that stayed. Where comparison took one of
    them for a message that is new behind the summary, the one edit names that too.
    """
    (place,) = summary.new

    def is_same(i: int, j: int) -> bool:
        return j != place and bool(_ids(before[i]) & _ids(after[j]) or not _ids(before[i]))

    matching = match_messages(before, after)
    stayed = [*matching.kept, *(pair for pair in matching.edited if is_same(*pair))]
    start = max((i + 1 for i, j in stayed if j < place), default=0)
    stop = min((i for i, j in stayed if j > place), default=len(before))
    replaced, others = list(summary.edits), []
    for change in changes:
        if change is summary:
            continue
        inside = change.old and all(start <= i < stop for i in change.old)
        if inside and not any(is_same(i, j) for i in change.old for j in change.new):
            replaced += change.edits
        else:
            others.append(change)
    others.append(Change(tuple(replaced), summary.claim))
    return sorted(others, key=lambda change: (change.old + change.new)[:1])


def _ids(message: Message) -> frozenset[str]:
    return names(message) - {message.content_hash}


def _differing(
    before: Sequence[BaseMessage], after: Sequence[BaseMessage]
) -> tuple[Sequence[BaseMessage], Sequence[BaseMessage]]:
    """Both lists without the messages that are the same at the beginning and at the end."""
    short = min(len(before), len(after))
    start = 0
    while start < short and _same(before[start], after[start]):
        start += 1
    stop = 0
    while stop < short - start and _same(before[-1 - stop], after[-1 - stop]):
        stop += 1
    return before[start : len(before) - stop], after[start : len(after) - stop]


def _same(a: BaseMessage, b: BaseMessage) -> bool:
    return a is b or a == b
