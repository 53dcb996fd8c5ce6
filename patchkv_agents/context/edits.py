"""Edits: what changed between two versions of a context.

A declared edit comes from the program that made the change; an inferred one from comparing two
versions. What can be seen without a declaration:

| kind | what is observed | may also be |
| --- | --- | --- |
| append | new messages after the last one that was there before | insert, refresh_evidence, \
revise_plan |
| insert | a new message before one that was there before; or a message gained one piece of text, \
part or call and lost nothing (`partial`) | refresh_evidence, revise_plan, other |
| delete | a message is gone; or a message lost one piece of text, part or call, for which at most \
a short marker stands (`partial`) | redact, summarize, replace_tool_result, revise_plan, other |
| move | a message is gone and the same one is new elsewhere; or the piece that one message lost \
is in another that did not have it (`partial`) | reorder |
| summarize | several messages in a row are replaced by one that resembles none of them; or a \
message changed and those behind it went (a running summary, a count of what is left out) | other |
| rewrite_system | a system or developer message changed | redact, refresh_evidence, revise_plan, \
reserialize, other |
| replace_tool_result | the content of a tool message changed | refresh_evidence, revise_plan, \
redact, summarize, other |
| drop_reasoning | only the reasoning of an assistant message is gone | delete |
| reserialize | same values, other bytes: key order, white space, Unicode form, text or parts | \
replace_tool_result, rewrite_system, other |
| reorder | the same tool schemas in another order | other |
| other | any other change | refresh_evidence, revise_plan, redact, summarize, delete, insert, \
reserialize |

Inference answers with the kind on the left. What it may also be cannot be told apart without a
declaration (`may_be`): why a text changed, whether a rewrite was a partial deletion, or a change
of form that went further. `refresh_evidence`, `revise_plan` and `redact` exist only when declared.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any, Literal, TypeVar, get_args

from patchkv_agents.context.frozen import FrozenJson, IdSource, check_text
from patchkv_agents.errors import ContextError

EditScope = Literal["messages", "tools", "template_args"]
EditPlace = Literal["state", "request"]

T = TypeVar("T", int, str)

_NOTHING = FrozenJson("{}")
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


_MAY_BE: Mapping[EditKind, frozenset[EditKind]] = {
    EditKind(seen): frozenset(map(EditKind, kinds.split()))
    for seen, kinds in {
        "append": "insert refresh_evidence revise_plan",
        "insert": "refresh_evidence revise_plan other",
        "delete": "redact summarize replace_tool_result revise_plan other",
        "move": "reorder",
        "summarize": "other",
        "rewrite_system": "redact refresh_evidence revise_plan reserialize other",
        "replace_tool_result": "refresh_evidence revise_plan redact summarize other",
        "drop_reasoning": "delete",
        "reserialize": "replace_tool_result rewrite_system other",
        "reorder": "other",
        "other": "refresh_evidence revise_plan redact summarize delete insert reserialize",
    }.items()
}


def may_be(seen: EditKind) -> frozenset[EditKind]:
    """The kinds that a change which looks like `seen` may be, `seen` included.

    They cannot be told apart without a declaration; inference answers with `seen`, the plainest.
    """
    return _MAY_BE.get(seen, frozenset()) | {seen}


@dataclass(frozen=True, slots=True)
class Edit:
    """One tracked change.

    Attributes:
        id: unique; sorts by time.
        kind: what was done.
        old_indices: the messages concerned, as indices into the old version; empty if none.
        new_indices: the same in the new version.
        message_ids: ids of these messages, as far as they have some.
        tool_call_ids: the calls that these messages answer, as far as they are tool results.
        before_hash: hash of the old content; None where there is none, or where it is forgotten.
        after_hash: the same of the new content.
        scope: what part of the version changed.
        where: `"state"`, or `"request"` for a change that is made anew for each call of the model
            and that the program's own state never shows.
        declared: stated by the program that made the change (otherwise inferred).
        corrected: declared, but what changed was not what the declaration said. Kind, indices and
            hashes are those of the real change; without indices, nothing answered to it.
        forget: nothing computed from the old content may survive.
        partial: only a part of the message changed.
        author: the tool, node or middleware that made the change, if known.
        thread: the thread whose history has the edit; empty outside of one.
        namespace: the thread's namespace.
        checkpoint_id: the agent framework's checkpoint at which it was made, if any.
        given_key: the caller's own idempotency key, if any.
        metadata: an object of the caller's.
        time_s: seconds since the epoch.
    """

    id: str
    kind: EditKind
    old_indices: tuple[int, ...] = ()
    new_indices: tuple[int, ...] = ()
    message_ids: tuple[str, ...] = ()
    tool_call_ids: tuple[str, ...] = ()
    before_hash: str | None = None
    after_hash: str | None = None
    scope: EditScope = "messages"
    where: EditPlace = "state"
    declared: bool = False
    corrected: bool = False
    forget: bool = False
    partial: bool = False
    author: str | None = None
    thread: str = ""
    namespace: str = ""
    checkpoint_id: str | None = None
    given_key: str | None = None
    metadata: FrozenJson = _NOTHING
    time_s: float = 0.0

    @property
    def old_index(self) -> int | None:
        """The first old message concerned."""
        return self.old_indices[0] if self.old_indices else None

    @property
    def new_index(self) -> int | None:
        """The first new message concerned."""
        return self.new_indices[0] if self.new_indices else None

    @property
    def idempotency_key(self) -> str:
        """Equal for the same change derived again, wherever its messages stand by then.

        The caller's own key; or made from the new content and the ids of the messages, or the old
        content where they have none. Neither indices, which shift, nor the kind count: inference
        may call a change by another name than its declaration.
        """
        if self.given_key is not None:
            return self.given_key
        named = self.message_ids or self.tool_call_ids
        before = None if named and self.after_hash else self.before_hash
        text = repr((self.scope, self.message_ids, self.tool_call_ids, before, self.after_hash))
        return blake2b(text.encode(), digest_size=16).hexdigest()

    @classmethod
    def declare(
        cls,
        kind: EditKind,
        *,
        old: Iterable[int] = (),
        new: Iterable[int] = (),
        message_ids: Iterable[str] = (),
        tool_call_ids: Iterable[str] = (),
        scope: EditScope = "messages",
        where: EditPlace = "state",
        author: str | None = None,
        forget: bool = False,
        partial: bool = False,
        idempotency_key: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Edit:
        """State an edit, to be passed to `ContextHistory.commit`, which fills in the rest.

        Messages are named by index, by id, or by the tool_call_id that they answer; a side that is
        left out (`old` or `new`) is taken from what really changed.

        Raises:
            ContextError: an argument has the wrong shape, or a text cannot be encoded.
        """
        what = f"A declared {kind} edit"
        try:
            kind = EditKind(kind)
        except ValueError:
            names = ", ".join(map(str, EditKind))
            raise ContextError(f"There is no kind {kind!r} of edits; use one of {names}.") from None
        for name, value, known in (("scope", scope, EditScope), ("where", where, EditPlace)):
            if value not in get_args(known):
                raise ContextError(f"{what}: {name} is {value!r}, not one of {get_args(known)}.")
        for text in (author, idempotency_key):
            check_text("" if text is None else text, what)
        return new_edit(
            kind,
            _items(old, int, what),
            _items(new, int, what),
            message_ids=_items(message_ids, str, what),
            tool_call_ids=_items(tool_call_ids, str, what),
            scope=scope,
            where=where,
            declared=True,
            author=author,
            forget=forget,
            partial=partial,
            given_key=idempotency_key,
            metadata=FrozenJson.of(dict(metadata), "metadata") if metadata else _NOTHING,
        )


def _items(values: Iterable[T], kind: type[T], what: str) -> tuple[T, ...]:
    """What a declaration names its messages by, checked."""
    items = values if isinstance(values, str) or not isinstance(values, Iterable) else tuple(values)
    if not isinstance(items, tuple) or not all(type(item) is kind for item in items):
        word = "indices" if kind is int else "ids"
        raise ContextError(f"{what}: name messages by a list of {word}, not by {values!r}.")
    return items


def new_edit(
    kind: EditKind,
    old: Iterable[int] = (),
    new: Iterable[int] = (),
    *,
    message_ids: Iterable[str] = (),
    tool_call_ids: Iterable[str] = (),
    before_hash: str | None = None,
    after_hash: str | None = None,
    scope: EditScope = "messages",
    where: EditPlace = "state",
    declared: bool = False,
    author: str | None = None,
    forget: bool = False,
    partial: bool = False,
    given_key: str | None = None,
    metadata: FrozenJson = _NOTHING,
) -> Edit:
    """Make an edit with a fresh id and the present time."""
    return Edit(
        id=_ids.next(),
        kind=kind,
        old_indices=tuple(old),
        new_indices=tuple(new),
        message_ids=tuple(message_ids),
        tool_call_ids=tuple(tool_call_ids),
        before_hash=before_hash,
        after_hash=after_hash,
        scope=scope,
        where=where,
        declared=declared,
        forget=forget,
        partial=partial,
        author=author,
        given_key=given_key,
        metadata=metadata,
        time_s=time.time(),
    )


def join_hashes(hashes: Sequence[str]) -> str | None:
    """One hash for several; None for none; a single one is itself."""
    if len(hashes) < 2:
        return hashes[0] if hashes else None
    return blake2b(" ".join(hashes).encode(), digest_size=16).hexdigest()
