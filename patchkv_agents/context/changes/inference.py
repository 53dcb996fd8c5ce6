"""Infers edits by comparing two versions, from what can be observed and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from patchkv_agents.context.changes.comparison import change_in_place
from patchkv_agents.context.changes.matching import Matching, match_messages
from patchkv_agents.context.edits import Edit, EditKind, EditScope, join_hashes, new_edit
from patchkv_agents.context.frozen import FrozenJson
from patchkv_agents.context.messages import Message
from patchkv_agents.context.texts import lost_piece

_MAX_SEARCHED_TEXT = 100_000_000  # of all new messages, for each piece; about 0.1 s
_NO_ARGS = FrozenJson("{}")


class Context(Protocol):
    """What is compared: a `Conversation`, or a `ContextVersion` (with template arguments)."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages in order."""

    @property
    def tools(self) -> tuple[FrozenJson, ...]:
        """The tool schemas in order."""


def infer_edits(
    old: Context | Sequence[Message], new: Context | Sequence[Message]
) -> tuple[Edit, ...]:
    """Find the edits that lead from `old` to `new`.

    Every message that changed, went or came is named by an edit; messages that are the same by
    content (ids do not count) are not. Kinds are as described in `patchkv_agents.context.edits`.

    Returns:
        Edits of template arguments and tools first, then those of messages, in their order.
    """
    old_messages, old_tools, old_args = _split(old)
    new_messages, new_tools, new_args = _split(new)
    edits = []
    if old_args != new_args:
        edits.append(_head_edit(EditKind.OTHER, "template_args", [old_args], [new_args]))
    if old_tools != new_tools:
        edits.append(_head_edit(_tools_kind(old_tools, new_tools), "tools", old_tools, new_tools))
    return (*edits, *_message_edits(old_messages, new_messages))


def _split(
    context: Context | Sequence[Message],
) -> tuple[Sequence[Message], Sequence[FrozenJson], FrozenJson]:
    if isinstance(context, Sequence):
        return context, (), _NO_ARGS
    return context.messages, context.tools, getattr(context, "template_args", _NO_ARGS)


def _head_edit(
    kind: EditKind, scope: EditScope, old: Iterable[FrozenJson], new: Iterable[FrozenJson]
) -> Edit:
    before, after = (join_hashes([value.content_hash for value in values]) for values in (old, new))
    return new_edit(kind, before_hash=before, after_hash=after, scope=scope)


def _tools_kind(old: Sequence[FrozenJson], new: Sequence[FrozenJson]) -> EditKind:
    before, after = [tool.canonical for tool in old], [tool.canonical for tool in new]
    if before == after:
        return EditKind.RESERIALIZE
    return EditKind.REORDER if sorted(before) == sorted(after) else EditKind.OTHER


@dataclass(frozen=True, slots=True)
class _Change:
    """An edit of messages in the making."""

    kind: EditKind
    old: tuple[int, ...]
    new: tuple[int, ...]
    partial: bool = False

    @property
    def place(self) -> tuple[int, tuple[int, ...]]:
        """What went stands where it was: by the old index, which later changes share."""
        return max(self.old[:1] + self.new[:1]), self.old


def _message_edits(old: Sequence[Message], new: Sequence[Message]) -> list[Edit]:
    matching = match_messages(old, new)
    changes = list(_with_moved_blocks(old, new, matching, list(_changes(old, new, matching))))
    changes.sort(key=lambda change: change.place)
    return [
        new_edit(
            change.kind,
            change.old,
            change.new,
            before_hash=join_hashes([old[i].content_hash for i in change.old]),
            after_hash=join_hashes([new[j].content_hash for j in change.new]),
            partial=change.partial,
        )
        for change in changes
    ]


def _changes(
    old: Sequence[Message], new: Sequence[Message], matching: Matching
) -> Iterator[_Change]:
    """Name what became of each message that is not the same at the same place."""
    last_kept = matching.kept[-1][1] if matching.kept else -1
    last_old = max((j for _, j in matching.edited), default=-1)
    last_old = max(last_old, last_kept, *(j for _, j in matching.summarized))
    removed = set(matching.removed)
    for i, j in matching.edited:
        kind, partial = change_in_place(old[i], new[j])
        if i + 1 in removed and j < last_kept and _may_stand_for_others(kind, i):
            # It stands for the messages behind it, which went, while later ones stay: a running
            # summary. (Where none stay, a turn was edited and the rest is to be done again.)
            kind = EditKind.SUMMARIZE
        yield _Change(kind, (i,), (j,), partial)
    for olds, j in matching.summarized:
        yield _Change(EditKind.SUMMARIZE, olds, (j,))
    for i, j in matching.moved:
        yield _Change(EditKind.MOVE, (i,), (j,))
    for i in matching.removed:
        yield _Change(EditKind.DELETE, (i,), ())
    for j in matching.added:
        yield _Change(EditKind.APPEND if j > last_old else EditKind.INSERT, (), (j,))


def _may_stand_for_others(kind: EditKind, index: int) -> bool:
    if kind is EditKind.REWRITE_SYSTEM:
        return index > 0  # a note of the program, not the system prompt
    return kind in (EditKind.OTHER, EditKind.INSERT)


def _with_moved_blocks(
    old: Sequence[Message], new: Sequence[Message], matching: Matching, changes: Sequence[_Change]
) -> Iterator[_Change]:
    """`changes`, and a partial move for each piece that one message lost and another one has.

    Where that one is new, it is named by the move alone.
    """
    pieces = {
        piece: (i, j)
        for i, j in matching.edited
        if (piece := lost_piece(old[i].text, new[j].text)) is not None
    }
    before = {j: old[i].text for i, j in matching.edited} | dict.fromkeys(matching.added, "")
    text = sum(len(new[j].text) for j in before)
    moves: dict[int, list[_Change]] = {}
    if pieces and len(pieces) * text <= _MAX_SEARCHED_TEXT:
        for piece, (i, own) in pieces.items():
            for j in before:
                if j != own and piece in new[j].text and piece not in before[j]:
                    moves.setdefault(j, []).append(_Change(EditKind.MOVE, (i,), (j,), True))
    for change in changes:
        if change.old or change.new[0] not in moves:
            yield change
    for found in moves.values():
        yield from found
