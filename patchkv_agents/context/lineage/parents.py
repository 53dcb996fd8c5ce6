"""The version that a context was made from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from patchkv_agents.context.lineage.index import VersionIndex
from patchkv_agents.context.messages import Message
from patchkv_agents.context.versioning.views import HistoryView
from patchkv_agents.context.versions import ContextVersion
from patchkv_agents.errors import ContextError

# Versions that are compared with a context of which no hint tells.
_MAX_COMPARED = 32


@dataclass(frozen=True, slots=True)
class Hint:
    """What an agent framework knows of where a context comes from.

    Attributes:
        versions: ids of the versions that its checkpoints name, oldest first: several where tasks
            ran side by side. Empty if the checkpoints name none.
        is_first: the framework is certain that the context was made from no version.
        author: who changed the messages on the way from these versions, if known.
    """

    versions: tuple[str, ...] = ()
    is_first: bool = False
    author: str | None = None


def find_parent(
    index: VersionIndex, messages: Sequence[Message], hint: Hint | None = None
) -> ContextVersion | None:
    """The version that a context was made from, or that it is.

    A hint decides; of several versions that it names, the nearest one is meant. Without a hint, in
    this order:

    1. the newest version of a branch with the same messages, then any such version;
    2. the one newest version of a branch that the context begins with;
    3. among recent versions, the one from which fewest messages went, came or changed.

    Args:
        index: of the history, refreshed.
        messages: of the context.
        hint: what the framework knows.

    Returns:
        None for a first context.
    """
    get = index.history.get
    if hint is not None and hint.versions:
        return nearest_version(index.history, hint.versions, messages)
    if hint is not None and hint.is_first:
        roots = [get(each) for each in index.equal(messages)]
        return next((version for version in roots if not version.parents), None)
    certain = certain_parent(index, messages)
    if certain is not None:
        return certain
    heads = index.heads()
    if equal := index.equal(messages):
        return get(max(heads.intersection(equal) or equal))
    compared = {*heads, *index.newest(_MAX_COMPARED)}
    return nearest_version(index.history, sorted(compared), messages)


def nearest_version(
    history: HistoryView, ids: Iterable[str], messages: Sequence[Message]
) -> ContextVersion | None:
    """The version from which fewest messages went, came or changed; the last of several.

    Versions that were deleted meanwhile are passed over.
    """
    versions = []
    for each in ids:
        try:
            versions.append(history.get(each))
        except ContextError:
            continue
    return min(reversed(versions), key=lambda each: _changes(each.messages, messages), default=None)


def certain_parent(index: VersionIndex, messages: Sequence[Message]) -> ContextVersion | None:
    """The version that messages alone make certain, so that no framework has to be asked.

    Returns:
        The only version with the same messages, if it is the newest of a branch; else the newest
        version of the only branch, if the context has its messages and more behind them.
    """
    heads, equal = index.heads(), index.equal(messages)
    if equal:
        is_certain = len(equal) == 1 and equal[0] in heads
        return index.history.get(equal[0]) if is_certain else None
    if len(heads) != 1:
        return None
    head = index.history.get(next(iter(heads)))
    count = len(head.messages)
    is_longer = count < len(messages) and head.messages == tuple(messages[:count])
    return head if is_longer else None


def _changes(old: Sequence[Message], new: Sequence[Message]) -> int:
    """How many messages went, came, or became others under the same id."""
    gone, came = set(old).difference(new), set(new).difference(old)
    ids = {message.id for message in gone} & {message.id for message in came} - {None}
    return len(gone) + len(came) - len(ids)
