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


def located(declaration: Edit, old: Sequence[Message], new: Sequence[Message]) -> Edit:
    """The declaration with indices for the messages that it names by id or tool_call_id.

    Raises:
        ContextError: it names a message that is in neither version, or that is not unique.
    """
    for side, indices, messages in (
        ("old", declaration.old_indices, old),
        ("new", declaration.new_indices, new),
    ):
        for index in indices:
            if not 0 <= index < len(messages):
                raise ContextError(
                    f"A declared {declaration.kind} edit names {side} message {index}, but the "
                    f"{side} version has {len(messages)}, from 0."
                )
    old_indices, new_indices = set(declaration.old_indices), set(declaration.new_indices)
    for name in (*declaration.message_ids, *declaration.tool_call_ids):
        places = named(old, name), named(new, name)
        if not any(places):
            raise ContextError(
                f"A declared {declaration.kind} edit names {name!r}, but no message of the old or "
                "the new version has this id or tool_call_id."
            )
        for places_of in places:
            if len(places_of) > 1:
                raise ContextError(
                    f"A declared {declaration.kind} edit names {name!r}, which messages "
                    f"{', '.join(map(str, places_of))} have; declare it by index, with "
                    "old= and new=."
                )
        old_indices.update(places[0])
        new_indices.update(places[1])
    return replace(
        declaration, old_indices=tuple(sorted(old_indices)), new_indices=tuple(sorted(new_indices))
    )


def carried(
    declaration: Edit, seen: Sequence[Message], old: Sequence[Message], new: Sequence[Message]
) -> Edit:
    """A declaration about `seen`, rewritten for `old`, which has replaced it since.

    Messages that `old` no longer has are named by the new side alone.
    """
    places = {message: index for index, message in enumerate(old)}
    kept = [places[seen[i]] for i in declaration.old_indices if seen[i] in places]
    return replace(declaration, old_indices=tuple(kept), message_ids=(), tool_call_ids=())


def is_possible(kind: EditKind, edit: Edit) -> bool:
    """Whether the inferred edit is compatible with the declared `kind`."""
    return kind in may_be(edit.kind) or (kind in _INTENTS and bool(edit.old_indices))


def reconcile(declared: Iterable[Edit], inferred: Iterable[Edit]) -> list[Edit]:
    """The inferred edits, completed from the declarations that match them.

    An inferred edit takes kind, author and so on from the first declaration that names one of its
    messages, and the flags of all of them. It keeps its indices, and its kind if the declared one
    is visibly wrong; both mark it as `corrected`. Several inferred edits that one declaration names
    exactly become one. Declarations without a matching edit are appended, without indices.
    """
    declared = list(declared)
    edits = list(inferred)
    matches = [
        [declaration for declaration in declared if _meets(declaration, edit)] for edit in edits
    ]
    result: list[Edit] = []
    merged: set[str] = set()
    for edit, matching in zip(edits, matches, strict=True):
        if not matching:
            result.append(edit)
        elif matching[0].id not in merged:
            same = [e for e, s in zip(edits, matches, strict=True) if s and s[0] is matching[0]]
            exact = _is_exactly(matching[0], same)
            if exact and len(same) > 1:
                merged.add(matching[0].id)
                old, new = _all_indices(same)
                partial = any(each.partial for each in same)
                edit = replace(edit, old_indices=old, new_indices=new, partial=partial)
            result.append(_named(edit, matching, exact=exact))
    matched = {declaration.id for matching in matches for declaration in matching}
    result += (
        replace(declaration, old_indices=(), new_indices=(), corrected=True)
        for declaration in declared
        if declaration.id not in matched
    )
    return result


def completed(
    edit: Edit, declaration: Edit | None, old: Sequence[Message], new: Sequence[Message]
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
    place = declaration or edit
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
        before_hash=None if declaration else before_hash,
        after_hash=after_hash,
    )


def _distinct(given: Iterable[str], more: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*given, *filter(None, more)]))


def _all_indices(edits: Sequence[Edit]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    old = {i for edit in edits for i in edit.old_indices}
    new = {j for edit in edits for j in edit.new_indices}
    return tuple(sorted(old)), tuple(sorted(new))


def _is_exactly(declaration: Edit, edits: Sequence[Edit]) -> bool:
    """Whether a declaration names the same messages as `edits`, on each side that it names."""
    if declaration.scope != "messages" or _same_swap(declaration, edits):
        return True
    declared = declaration.old_indices, declaration.new_indices
    return all(
        not some or set(some) == set(actual)
        for some, actual in zip(declared, _all_indices(edits), strict=True)
    )


def _same_swap(declaration: Edit, edits: Sequence[Edit]) -> bool:
    """Whether both move one of two neighbours past the other, which is the same edit."""
    if len(edits) != 1 or (declaration.kind, edits[0].kind) != (EditKind.MOVE, EditKind.MOVE):
        return False
    declared, actual = ({*edit.old_indices, *edit.new_indices} for edit in (declaration, edits[0]))
    return declared == actual and len(declared) == 2 and max(declared) - min(declared) == 1


def _named(edit: Edit, declarations: Sequence[Edit], *, exact: bool) -> Edit:
    declaration = declarations[0]
    is_plausible = is_possible(declaration.kind, edit)
    partial = edit.partial or any(each.partial for each in declarations)
    if declaration.kind in _PARTIAL and edit.kind is EditKind.OTHER and not partial:
        is_plausible = False  # the message is still there, and none of its text
    return replace(
        edit,
        kind=declaration.kind if is_plausible else edit.kind,
        where=declaration.where,
        author=declaration.author,
        declared=True,
        corrected=not (exact and is_plausible),
        forget=any(each.forget for each in declarations),
        partial=partial,
        given_key=declaration.given_key,
        metadata=declaration.metadata,
    )


def _meets(declaration: Edit, edit: Edit) -> bool:
    if declaration.scope != edit.scope or declaration.scope != "messages":
        return declaration.scope == edit.scope
    if _same_swap(declaration, [edit]):
        return True
    old, new = set(declaration.old_indices), set(declaration.new_indices)
    return not (old.isdisjoint(edit.old_indices) and new.isdisjoint(edit.new_indices))
