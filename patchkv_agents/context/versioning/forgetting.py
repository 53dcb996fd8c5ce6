"""Forgetting: removes text from all versions of a context.

Removed when an edit of a version has the `forget` flag:

- the old messages that these edits name, and every earlier form of them, back to the first one;
- later forms, on other branches, that kept a part of the text (partial edits, the same values
  written in another way);
- every message with exactly the same content as one of these, in any place;
- tool schemas and template arguments that such an edit replaced; they are replaced by the new ones
  in earlier versions too;
- with secrets: each of these texts, anywhere in messages, tool schemas, template arguments and
  edits.

Removed messages stay in place without content, so that indices and call ids remain valid. Messages
of the new version are left alone: the caller still shows them. Messages that were written after
reading the text (a summary, an answer) are found through secrets only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from patchkv_agents.context.edits import Edit, EditKind
from patchkv_agents.context.lineage.forms import predecessors
from patchkv_agents.context.messages import Message
from patchkv_agents.context.versioning.scrubbing import Scrubber, emptied
from patchkv_agents.context.versions import ContextVersion, Forgotten, ThreadKey

_KEEPS_TEXT = frozenset((EditKind.RESERIALIZE, EditKind.DROP_REASONING))


def forget(
    versions: Sequence[ContextVersion],
    at: str,
    targets: Iterable[int],
    scrubber: Scrubber,
    threads: tuple[ThreadKey, ...],
) -> list[ContextVersion]:
    """All versions with the text to be forgotten removed.

    Args:
        versions: every version of the thread and of its forks; parents before children.
        at: id of the new version with the `forget` edits; it receives the record of the removal.
        targets: the messages of its first parent that are to be forgotten, as indices.
        scrubber: removes the secrets.
        threads: the threads that have these versions.

    Returns:
        The versions in the same order, with the same ids.
    """
    by_id = {version.id: version for version in versions}
    version = by_id[at]
    gone = _earlier_forms(by_id, version, set(targets))
    gone |= _later_forms(by_id, gone, at)
    shown = {message.content_hash for message in version.messages}
    left = tuple(j for j, m in enumerate(version.messages) if m.content_hash in gone)
    gone -= shown

    @cache
    def without(message: Message) -> Message:
        return emptied(message) if message.content_hash in gone else scrubber.message(message)

    scopes = {edit.scope for edit in version.edits if edit.forget}
    line = _ancestors(by_id, version)
    old_tools = {each.tools for each in line} if "tools" in scopes else set()
    old_args = {each.template_args for each in line} if "template_args" in scopes else set()
    rewritten = [
        replace(
            each,
            messages=tuple(map(without, each.messages)),
            tools=version.tools
            if each.tools in old_tools
            else tuple(map(scrubber.frozen, each.tools)),
            template_args=version.template_args
            if each.template_args in old_args
            else scrubber.frozen(each.template_args),
            author=each.author and scrubber.text(each.author),
            checkpoint_id=each.checkpoint_id and scrubber.text(each.checkpoint_id),
        )
        for each in versions
    ]
    after = {each.id: each for each in rewritten}
    hashes = 0
    for place, each in enumerate(rewritten):
        parent = each.parents[0] if each.parents else each.id
        pairs = (by_id[parent], after[parent]), (by_id[each.id], each)
        edits = [_without_hashes(edit, *pairs) for edit in each.edits]
        hashes += sum(number for _, number in edits)
        rewritten[place] = replace(each, edits=tuple(scrubber.edit(edit) for edit, _ in edits))
    account = Forgotten(
        messages=sum(
            1
            for message in {message for each in versions for message in each.messages}
            if without(message) != message
        ),
        versions=tuple(each.id for each in versions if not _same_context(each, after[each.id])),
        threads=threads,
        hashes=hashes,
        still_shown=left,
    )
    return [replace(each, forgotten=account) if each.id == at else each for each in rewritten]


def _ancestors(
    by_id: Mapping[str, ContextVersion], version: ContextVersion
) -> list[ContextVersion]:
    """The first parents of a version."""
    line = []
    while version.parents:
        version = by_id[version.parents[0]]
        line.append(version)
    return line


def _earlier_forms(
    by_id: Mapping[str, ContextVersion], version: ContextVersion, targets: set[int]
) -> set[str]:
    """Hashes of the target messages in the version's parent, and of their earlier forms."""
    gone: set[str] = set()
    child = version
    for parent in _ancestors(by_id, version):
        if child is not version:
            origins = predecessors(parent, child)
            targets = {i for j in targets for i in origins[j]}
        gone |= {parent.messages[i].content_hash for i in targets}
        child = parent
    return gone


def _later_forms(by_id: Mapping[str, ContextVersion], gone: set[str], at: str) -> set[str]:
    """Hashes of messages on any branch that retain a part of a message to be forgotten."""
    reached = set(gone)
    for version in by_id.values():
        if not version.parents or version.id == at:
            continue
        parent = by_id[version.parents[0]]
        for edit in version.edits:
            keeps_text = edit.partial or edit.kind in _KEEPS_TEXT
            if keeps_text and any(
                parent.messages[i].content_hash in reached for i in edit.old_indices
            ):
                reached.update(version.messages[j].content_hash for j in edit.new_indices)
    return reached - gone


def _same_context(a: ContextVersion, b: ContextVersion) -> bool:
    return (a.messages, a.tools, a.template_args) == (b.messages, b.tools, b.template_args)


def _without_hashes(
    edit: Edit,
    parent: tuple[ContextVersion, ContextVersion],
    version: tuple[ContextVersion, ContextVersion],
) -> tuple[Edit, int]:
    """The edit without hashes and keys of removed text, and how many were dropped.

    Args:
        edit: an edit of `version`.
        parent: the version's first parent, before and after the text was removed.
        version: the version, before and after.
    """
    before = _changed(edit, edit.old_indices, *parent)
    after = _changed(edit, edit.new_indices, *version)
    if not (edit.old_indices or edit.new_indices) and edit.scope == "messages":
        # Nothing answered to the declaration, so it is not known which messages it hashed.
        before = after = before or after
    lighter = replace(
        edit,
        before_hash=None if before else edit.before_hash,
        after_hash=None if after else edit.after_hash,
        given_key=None if before or after else edit.given_key,
    )
    names = ("before_hash", "after_hash", "given_key")
    return lighter, sum(getattr(edit, name) != getattr(lighter, name) for name in names)


def _changed(
    edit: Edit, indices: tuple[int, ...], old: ContextVersion, new: ContextVersion
) -> bool:
    if edit.scope == "tools":
        return old.tools != new.tools
    if edit.scope == "template_args":
        return old.template_args != new.template_args
    if not (edit.old_indices or edit.new_indices):
        return old.messages != new.messages
    return any(old.messages[i] != new.messages[i] for i in indices)
