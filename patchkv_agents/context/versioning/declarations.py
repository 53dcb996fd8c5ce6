"""Reconciles the edits that a program declares with the edits that are inferred."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from patchkv_agents.context.edits import Edit, EditKind, join_hashes, may_be
from patchkv_agents.context.messages import Message
from patchkv_agents.context.versioning.targets import named
from patchkv_agents.errors import ContextError

# What a change of a message was meant to be cannot be seen, so the declaration is believed.
_INTENTS = frozenset(
    (
        EditKind.REFRESH_EVIDENCE,
        EditKind.REVISE_PLAN,
        EditKind.SUMMARIZE,
        EditKind.REDACT,
        EditKind.OTHER,
    )
)

# Of a message that was there before and is there now, these are partial edits.
_PARTIAL = frozenset((EditKind.DELETE, EditKind.INSERT))


def located(said: Edit, old: Sequence[Message], new: Sequence[Message]) -> Edit:
    """The declaration with indices for the messages that it names by id or tool_call_id.

    Raises:
        ContextError: it names a message that is in neither version, or that is not unique.
    """
    for side, indices, messages in (("old", said.old_indices, old), ("new", said.new_indices, new)):
        for index in indices:
            if not 0 <= index < len(messages):
                raise ContextError(
                    f"A declared {said.kind} edit names {side} message {index}, but the {side} "
                    f"version has {len(messages)}, from 0."
                )
    old_indices, new_indices = set(said.old_indices), set(said.new_indices)
    for name in (*said.message_ids, *said.tool_call_ids):
        places = named(old, name), named(new, name)
        if not any(places):
            raise ContextError(
                f"A declared {said.kind} edit names {name!r}, but no message of the old or the new "
                "version has this id or tool_call_id."
            )
        for found in places:
            if len(found) > 1:
                raise ContextError(
                    f"A declared {said.kind} edit names {name!r}, which messages "
                    f"{', '.join(map(str, found))} have; declare it by index, with old= and new=."
                )
        old_indices.update(places[0])
        new_indices.update(places[1])
    return replace(
        said, old_indices=tuple(sorted(old_indices)), new_indices=tuple(sorted(new_indices))
    )


def carried(
    said: Edit, seen: Sequence[Message], old: Sequence[Message], new: Sequence[Message]
) -> Edit:
    """A declaration about `seen`, rewritten for `old`, which has replaced it since.

    Messages that `old` no longer has are named by the new side alone.
    """
    places = {message: index for index, message in enumerate(old)}
    kept = [places[seen[i]] for i in said.old_indices if seen[i] in places]
    return replace(said, old_indices=tuple(kept), message_ids=(), tool_call_ids=())


def is_possible(kind: EditKind, found: Edit) -> bool:
    """Whether the inferred edit is compatible with the declared `kind`."""
    return kind in may_be(found.kind) or (kind in _INTENTS and bool(found.old_indices))


def reconcile(declared: Iterable[Edit], inferred: Iterable[Edit]) -> list[Edit]:
    """The inferred edits, completed from the declarations that match them.

    An inferred edit takes kind, author and so on from the first declaration that names one of its
    messages, and the flags of all of them. It keeps its indices, and its kind if the declared one
    is visibly wrong; both mark it as `corrected`. Several inferred edits that one declaration names
    exactly become one. Declarations without a matching edit are appended, without indices.
    """
    declared = list(declared)
    found = list(inferred)
    matches = [[said for said in declared if _meets(said, edit)] for edit in found]
    result: list[Edit] = []
    merged: set[str] = set()
    for edit, says in zip(found, matches, strict=True):
        if not says:
            result.append(edit)
        elif says[0].id not in merged:
            same = [e for e, s in zip(found, matches, strict=True) if s and s[0] is says[0]]
            exact = _is_exactly(says[0], same)
            if exact and len(same) > 1:
                merged.add(says[0].id)
                old, new = _all_indices(same)
                partial = any(each.partial for each in same)
                edit = replace(edit, old_indices=old, new_indices=new, partial=partial)
            result.append(_named(edit, says, exact=exact))
    answered = {said.id for says in matches for said in says}
    result += (
        replace(said, old_indices=(), new_indices=(), corrected=True)
        for said in declared
        if said.id not in answered
    )
    return result


def completed(
    edit: Edit, said: Edit | None, old: Sequence[Message], new: Sequence[Message]
) -> Edit:
    """The edit with ids and hashes of its messages.

    Args:
        edit: as `reconcile` returns it.
        said: the located declaration, if no inferred edit matches it.
        old: the old version's messages.
        new: the new version's messages.
    """
    if edit.scope != "messages":
        return edit
    place = said or edit
    before = [old[i] for i in place.old_indices]
    after = [new[j] for j in place.new_indices]
    before_hash = join_hashes([message.content_hash for message in before])
    after_hash = join_hashes([message.content_hash for message in after])
    concerned = [*before, *after]
    return replace(
        edit,
        message_ids=_distinct(edit.message_ids, (m.id for m in concerned)),
        tool_call_ids=_distinct(edit.tool_call_ids, (m.tool_call_id for m in concerned)),
        # Where nothing changed, the old content is that of an earlier version, which is not known.
        before_hash=None if said else before_hash,
        after_hash=after_hash,
    )


def _distinct(given: Iterable[str], more: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*given, *filter(None, more)]))


def _all_indices(edits: Sequence[Edit]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    old = {i for edit in edits for i in edit.old_indices}
    new = {j for edit in edits for j in edit.new_indices}
    return tuple(sorted(old)), tuple(sorted(new))


def _is_exactly(said: Edit, found: Sequence[Edit]) -> bool:
    """Whether a declaration names the messages of `found`, as far as it names any on a side."""
    if said.scope != "messages" or _same_swap(said, found):
        return True
    told = said.old_indices, said.new_indices
    return all(
        not some or set(some) == set(seen)
        for some, seen in zip(told, _all_indices(found), strict=True)
    )


def _same_swap(said: Edit, found: Sequence[Edit]) -> bool:
    """Whether both move one of two neighbours past the other, which is the same edit."""
    if len(found) != 1 or (said.kind, found[0].kind) != (EditKind.MOVE, EditKind.MOVE):
        return False
    told, seen = ({*edit.old_indices, *edit.new_indices} for edit in (said, found[0]))
    return told == seen and len(told) == 2 and max(told) - min(told) == 1


def _named(found: Edit, says: Sequence[Edit], *, exact: bool) -> Edit:
    said = says[0]
    believed = is_possible(said.kind, found)
    partial = found.partial or any(each.partial for each in says)
    if said.kind in _PARTIAL and found.kind is EditKind.OTHER and not partial:
        believed = False  # the message is still there, and none of its text
    return replace(
        found,
        kind=said.kind if believed else found.kind,
        where=said.where,
        author=said.author,
        declared=True,
        corrected=not (exact and believed),
        forget=any(each.forget for each in says),
        partial=partial,
        given_key=said.given_key,
        metadata=said.metadata,
    )


def _meets(said: Edit, found: Edit) -> bool:
    if said.scope != found.scope or said.scope != "messages":
        return said.scope == found.scope
    if _same_swap(said, [found]):
        return True
    old, new = set(said.old_indices), set(said.new_indices)
    return not (old.isdisjoint(found.old_indices) and new.isdisjoint(found.new_indices))
