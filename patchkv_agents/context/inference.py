"""Infers edits by comparing two versions, from what can be observed and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from patchkv_agents.context.comparison import change_in_place
from patchkv_agents.context.edits import Edit, EditKind, EditScope, join_hashes, new_edit
from patchkv_agents.context.frozen import FrozenJson
from patchkv_agents.context.matching import Matching, match_messages
from patchkv_agents.context.messages import Message

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
    if [tool.canonical for tool in old] == [tool.canonical for tool in new]:
        return EditKind.RESERIALIZE
    if sorted(tool.text for tool in old) == sorted(tool.text for tool in new):
        return EditKind.REORDER
    return EditKind.OTHER


def _message_edits(old: Sequence[Message], new: Sequence[Message]) -> list[Edit]:
    matching = match_messages(old, new)
    found = list(_kinds(old, new, matching))
    # Messages that went stand where they were: by the old index, which later edits share.
    found.sort(key=lambda change: (max(change[1][:1] + change[2][:1]), change[1]))
    return [
        new_edit(
            kind,
            old_indices,
            new_indices,
            before_hash=join_hashes([old[i].content_hash for i in old_indices]),
            after_hash=join_hashes([new[j].content_hash for j in new_indices]),
            partial=partial,
        )
        for kind, old_indices, new_indices, partial in found
    ]


def _kinds(
    old: Sequence[Message], new: Sequence[Message], matching: Matching
) -> Iterator[tuple[EditKind, tuple[int, ...], tuple[int, ...], bool]]:
    """Name each change: kind, old indices, new indices, partial."""
    last_kept = max((j for _, j in matching.kept), default=-1)
    last_old = max((j for _, j in matching.edited), default=-1)
    last_old = max(last_old, last_kept, *(news[-1] for _, news in matching.summarized))
    for i, j in matching.edited:
        kind, partial = change_in_place(old[i], new[j])
        if kind is EditKind.OTHER and i + 1 in matching.removed and j < last_kept:
            # It stands for the messages behind it, which went, while later ones stay: a running
            # summary. (Where none stay, a turn was edited and the rest is to be done again.)
            kind = EditKind.SUMMARIZE
        yield kind, (i,), (j,), partial
    for olds, news in matching.summarized:
        yield EditKind.SUMMARIZE, tuple(olds), tuple(news), False
    for i, j in matching.moved:
        yield EditKind.MOVE, (i,), (j,), False
    for i in matching.removed:
        yield EditKind.DELETE, (i,), (), False
    for j in matching.added:
        yield EditKind.APPEND if j > last_old else EditKind.INSERT, (), (j,), False
