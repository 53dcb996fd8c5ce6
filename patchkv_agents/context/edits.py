"""Edits: what changed between two versions of a context.

A declared edit comes from the program that made the change; an inferred one from comparing two
versions. What can be seen without a declaration:

| kind | what is observed |
| --- | --- |
| append | new messages after the last one that was there before |
| insert | a new message before one that was there before; or text put into a message |
| delete | a message is gone; or a message lost one piece of text and gained nothing (`partial`) |
| move | a message is gone and the same message is new elsewhere |
| summarize | several messages in a row are replaced by fewer new ones that resemble none of them |
| rewrite_system | a system or developer message changed |
| replace_tool_result | the content of a tool message changed |
| drop_reasoning | only the reasoning of an assistant message is gone |
| reserialize | same values, other bytes: key order, white space, Unicode form, text or parts |
| reorder | the same tool schemas in another order |
| other | any other change |

`refresh_evidence` and `revise_plan` look like `replace_tool_result` or `other`, `redact` like
`other`: they exist only when declared.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b
from typing import Literal

from patchkv_agents.context.frozen import IdSource

EditScope = Literal["messages", "tools", "template_args"]

_ids = IdSource()


class EditKind(str, Enum):
    """The kinds of edits."""

    REPLACE_TOOL_RESULT = "replace_tool_result"
    REFRESH_EVIDENCE = "refresh_evidence"
    REVISE_PLAN = "revise_plan"
    SUMMARIZE = "summarize"
    DELETE = "delete"
    INSERT = "insert"
    MOVE = "move"
    REORDER = "reorder"
    REDACT = "redact"
    REWRITE_SYSTEM = "rewrite_system"
    DROP_REASONING = "drop_reasoning"
    RESERIALIZE = "reserialize"
    APPEND = "append"
    OTHER = "other"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Edit:
    """One tracked change.

    Attributes:
        id: unique; sorts by time.
        kind: what was done.
        old_indices: the messages concerned, as indices into the old version; empty if none.
        new_indices: the same in the new version.
        before_hash: hash of the old content; None where there is none.
        after_hash: hash of the new content; None where there is none.
        scope: what part of the version changed.
        declared: stated by the program that made the change (otherwise inferred).
        corrected: declared, but what changed was not what the declaration said; the indices and
            hashes are those of the real change.
        forget: nothing computed from the old content may survive.
        partial: only a part of the message changed.
        author: the tool, node or middleware that made the change, if known.
        idempotency_key: equal for the same change derived again.
        time_s: seconds since the epoch.
    """

    id: str
    kind: EditKind
    old_indices: tuple[int, ...] = ()
    new_indices: tuple[int, ...] = ()
    before_hash: str | None = None
    after_hash: str | None = None
    scope: EditScope = "messages"
    declared: bool = False
    corrected: bool = False
    forget: bool = False
    partial: bool = False
    author: str | None = None
    idempotency_key: str = ""
    time_s: float = 0.0

    @property
    def old_index(self) -> int | None:
        """The first old message concerned."""
        return self.old_indices[0] if self.old_indices else None

    @property
    def new_index(self) -> int | None:
        """The first new message concerned."""
        return self.new_indices[0] if self.new_indices else None

    @classmethod
    def declare(
        cls,
        kind: EditKind,
        *,
        old: Iterable[int] = (),
        new: Iterable[int] = (),
        scope: EditScope = "messages",
        author: str | None = None,
        forget: bool = False,
        partial: bool = False,
    ) -> Edit:
        """State an edit, to be passed to `ContextHistory.commit`, which fills in the hashes."""
        return new_edit(
            kind,
            old,
            new,
            scope=scope,
            declared=True,
            author=author,
            forget=forget,
            partial=partial,
        )


def new_edit(
    kind: EditKind,
    old: Iterable[int] = (),
    new: Iterable[int] = (),
    *,
    before_hash: str | None = None,
    after_hash: str | None = None,
    scope: EditScope = "messages",
    declared: bool = False,
    author: str | None = None,
    forget: bool = False,
    partial: bool = False,
) -> Edit:
    """Make an edit with a fresh id, the present time and its idempotency key."""
    old, new = tuple(old), tuple(new)
    return Edit(
        id=_ids.next(),
        kind=kind,
        old_indices=old,
        new_indices=new,
        before_hash=before_hash,
        after_hash=after_hash,
        scope=scope,
        declared=declared,
        forget=forget,
        partial=partial,
        author=author,
        idempotency_key=_idempotency_key(scope, old, new, before_hash, after_hash),
        time_s=time.time(),
    )


def join_hashes(hashes: Sequence[str]) -> str | None:
    """One hash for several; None for none; a single one is itself."""
    if len(hashes) < 2:
        return hashes[0] if hashes else None
    return blake2b(" ".join(hashes).encode(), digest_size=16).hexdigest()


def reconcile(declared: Iterable[Edit], inferred: Iterable[Edit]) -> tuple[Edit, ...]:
    """Bring what was declared and what really changed together.

    Each inferred edit takes kind, author and flags from the declared edit that names one of its
    messages; indices and hashes stay those found. A declared edit that misses the real change, or
    that nothing answers to, is kept and marked `corrected`, so that a `forget` is never lost.
    """
    declared = list(declared)
    answered: set[str] = set()
    result = []
    for found in inferred:
        matches = [said for said in declared if _meets(said, found)]
        answered.update(said.id for said in matches)
        result.append(_declared_as(found, matches) if matches else found)
    missing = (said for said in declared if said.id not in answered)
    result += [replace(said, old_indices=(), new_indices=(), corrected=True) for said in missing]
    return tuple(result)


def _declared_as(found: Edit, matches: Sequence[Edit]) -> Edit:
    """The change that was found, under the name of its first declaration and with all flags."""
    said = matches[0]
    same = (said.old_indices, said.new_indices) == (found.old_indices, found.new_indices)
    return replace(
        found,
        kind=said.kind,
        author=said.author,
        declared=True,
        corrected=not same,
        forget=any(match.forget for match in matches),
        partial=found.partial or any(match.partial for match in matches),
    )


def _meets(said: Edit, found: Edit) -> bool:
    if said.scope != found.scope or said.scope != "messages":
        return said.scope == found.scope
    old, new = set(said.old_indices), set(said.new_indices)
    return not (old.isdisjoint(found.old_indices) and new.isdisjoint(found.new_indices))


def _idempotency_key(
    scope: str, old: Sequence[int], new: Sequence[int], before: str | None, after: str | None
) -> str:
    """Without the kind: inference may call the same change by another name than a declaration."""
    text = repr((scope, tuple(old), tuple(new), before, after))
    return blake2b(text.encode(), digest_size=16).hexdigest()
