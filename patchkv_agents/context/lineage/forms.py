"""Which message of a version came from which message of the version before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from patchkv_agents.context.changes.inference import infer_edits
from patchkv_agents.context.edits import Edit
from patchkv_agents.context.messages import Message
from patchkv_agents.context.versions import ContextVersion


@dataclass(frozen=True, slots=True)
class MessageForm:
    """One form that a message had, from `version_id` on.

    Attributes:
        version_id: the version that introduced it.
        index: where the message stands in that version.
        message: the message in this form.
        edit: the edit that made it; None in a first version.
    """

    version_id: str
    index: int
    message: Message
    edit: Edit | None


def predecessors(parent: ContextVersion, child: ContextVersion) -> list[tuple[int, ...]]:
    """For each message of `child`, the messages of `parent` that it came from, as indices.

    An edit's new messages come from all its old ones; those that no edit names, from their like,
    in order.
    """
    result = _by_edits(parent, child, child.edits)
    if result is None:  # made by a program that stored edits of its own
        result = _by_edits(parent, child, infer_edits(parent, child))
    if result is None:
        raise RuntimeError("inferred edits name every message that changed")
    return result


def _by_edits(
    parent: ContextVersion, child: ContextVersion, edits: tuple[Edit, ...]
) -> list[tuple[int, ...]] | None:
    result: list[tuple[int, ...]] = [()] * len(child.messages)
    gone: set[int] = set()
    made: set[int] = set()
    for edit in edits:
        gone.update(edit.old_indices)
        made.update(edit.new_indices)
        for j in edit.new_indices:
            result[j] = tuple(dict.fromkeys((*result[j], *edit.old_indices)))
    kept = [i for i in range(len(parent.messages)) if i not in gone]
    places = [j for j in range(len(child.messages)) if j not in made]
    if len(kept) != len(places):
        return None
    for i, j in zip(kept, places, strict=True):
        result[j] = (i,)
    return result


def forms(
    version: ContextVersion,
    index: int,
    parent_of: Callable[[ContextVersion], ContextVersion | None],
) -> Iterator[MessageForm]:
    """The forms of a message, its present one first, then those it was made from.

    Args:
        version: where it is looked at.
        index: which message of it.
        parent_of: the first parent of a version; None for a first version.
    """
    wanted = {index}
    while wanted:
        parent = parent_of(version)
        origins = predecessors(parent, version) if parent else [()] * len(version.messages)
        earlier: set[int] = set()
        for j in sorted(wanted):
            message = version.messages[j]
            edit = next((edit for edit in version.edits if j in edit.new_indices), None)
            olds = [parent.messages[i] for i in origins[j]] if parent else []
            if [old.content_hash for old in olds] != [message.content_hash]:
                yield MessageForm(version.id, j, message, edit)
            earlier.update(origins[j])
        if parent is None:
            return
        version, wanted = parent, earlier
