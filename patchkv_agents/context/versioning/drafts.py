"""Drafts: turns a context that a caller commits into a version with its edits."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from patchkv_agents.context.changes.inference import infer_edits
from patchkv_agents.context.edits import Edit
from patchkv_agents.context.frozen import FrozenJson, check_text
from patchkv_agents.context.lineage.forms import predecessors
from patchkv_agents.context.messages import NO_EXTRA, Message
from patchkv_agents.context.sequences import equal_ends
from patchkv_agents.context.stores.codec import encode_message
from patchkv_agents.context.versioning.declarations import carried, completed, located, reconcile
from patchkv_agents.context.versioning.scrubbing import Scrubber
from patchkv_agents.context.versions import ContextVersion, ThreadKey

_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Draft:
    """A context to be committed, with its declared edits.

    Attributes:
        messages: the whole list.
        tools: the tool schemas.
        template_args: arguments of the chat template.
        declared: edits that the caller declares.
        author: the author, also of edits without one.
        checkpoint_id: the agent framework's checkpoint.
        merged: ids of further parents.
        scrubber: removes secrets that are to be forgotten.
        targets: messages of the version before whose earlier forms are to be forgotten, as indices;
            None: those that edits with `forget` name.
    """

    messages: Sequence[Message]
    tools: tuple[FrozenJson, ...] = ()
    template_args: FrozenJson = FrozenJson("{}")
    declared: tuple[Edit, ...] = ()
    author: str | None = None
    checkpoint_id: str | None = None
    merged: tuple[str, ...] = ()
    scrubber: Scrubber = Scrubber()
    targets: frozenset[int] | None = None

    def with_merged(self, ids: Iterable[str]) -> Draft:
        """The draft with further parents."""
        return replace(self, merged=tuple(ids))

    def is_content_of(self, version: ContextVersion) -> bool:
        """Whether the draft has the same content as `version`."""
        return (tuple(self.messages), self.tools, self.template_args) == (
            version.messages,
            version.tools,
            version.template_args,
        )


@dataclass(frozen=True, slots=True)
class Drafted:
    """A version that is ready to be stored.

    Attributes:
        version: the version.
        forgets: whether an edit says `forget`.
        forgotten: the messages of its first parent that are to be forgotten, as indices.
    """

    version: ContextVersion
    forgets: bool = False
    forgotten: frozenset[int] = _NONE


def first_version(draft: Draft, version: ContextVersion) -> Drafted:
    """The draft as a first version, which has no edits."""
    return Drafted(_filled(draft, version, ()))


def next_version(
    draft: Draft,
    version: ContextVersion,
    *,
    thread: ThreadKey,
    base: ContextVersion,
    seen: ContextVersion,
    is_recorded: Callable[[Edit], bool],
) -> Drafted | None:
    """The draft as the version after `base`.

    Args:
        draft: what is wanted.
        version: has the id and the time.
        thread: where it belongs.
        base: the version that it follows.
        seen: the version that declared edits call "old": `base`, unless another writer has
            committed in between.
        is_recorded: whether such a declared edit is among those that led to `base`.

    Returns:
        The version; None if it would not differ from `base`.

    Raises:
        ContextError: a declared edit names messages that do not exist.
    """
    version = _filled(draft, version, base.messages)
    version = replace(version, parents=(base.id, *draft.merged))
    declared = [located(said, seen.messages, version.messages) for said in draft.declared]
    if seen.id != base.id:
        declared = [
            carried(said, seen.messages, base.messages, version.messages) for said in declared
        ]
    located_by_id = {said.id: said for said in declared}
    edits = []
    for edit in reconcile(declared, infer_edits(base, version)):
        said = located_by_id.get(edit.id)  # None if something answered to it, or it was inferred
        edit = completed(edit, said, base.messages, version.messages)
        if said and not draft.scrubber.needles and _tells(edit) and is_recorded(edit):
            continue
        edits.append(
            replace(
                edit,
                author=edit.author or draft.author,
                thread=thread.thread,
                namespace=thread.namespace,
                checkpoint_id=draft.checkpoint_id,
            )
        )
    forgets = any(edit.forget for edit in edits)
    if draft.is_content_of(base) and not forgets and not draft.merged:
        return None
    version = replace(version, edits=tuple(edits))
    return Drafted(version, forgets, _targets(draft, declared, base, version) if forgets else _NONE)


def _targets(
    draft: Draft, declared: Sequence[Edit], base: ContextVersion, version: ContextVersion
) -> frozenset[int]:
    """The messages of `base` to be forgotten, together with their earlier forms."""
    if draft.targets is not None:
        return draft.targets
    origins = predecessors(base, version)
    targets = {i for edit in version.edits if edit.forget for i in edit.old_indices}
    for said in declared:
        if said.forget:
            targets.update(said.old_indices)
            targets.update(i for j in said.new_indices for i in origins[j])
    return frozenset(targets)


def _tells(edit: Edit) -> bool:
    """Whether the idempotency key of an edit without indices means something."""
    return bool(edit.message_ids or edit.tool_call_ids or edit.after_hash or edit.given_key)


def recognized(
    messages: Sequence[Mapping[str, Any] | Message], known: Iterable[Message]
) -> Sequence[Mapping[str, Any] | Message]:
    """The list with messages of `base` in place of equal dicts, which saves parsing them.

    Only plain text messages are compared this way.
    """
    if not isinstance(messages, list | tuple) or set(map(type, messages)) <= {Message}:
        return messages
    plain = {(message.role, *_plain(message)): message for message in known if _is_plain(message)}
    result: list[Mapping[str, Any] | Message] = []
    for message in messages:
        key = _key(message)
        same = plain.get(key) if key else None
        result.append(same or message)
    return result


_PLAIN_FIELDS = ("content", "name", "tool_call_id", "id")
_PLAIN_KEYS = frozenset(("role", *_PLAIN_FIELDS))


def _plain(message: Message) -> tuple[Any, ...]:
    return message.content, message.name, message.tool_call_id, message.id


def _is_plain(message: Message) -> bool:
    others = (message.tool_calls, message.reasoning, message.extra, message.metadata)
    return isinstance(message.content, str) and others == ((), None, NO_EXTRA, NO_EXTRA)


def _key(message: Mapping[str, Any] | Message) -> tuple[Any, ...] | None:
    """Lookup key of a plain text message; None for any other."""
    if type(message) is not dict or not message.keys() <= _PLAIN_KEYS:
        return None
    key = (message.get("role"), *(message.get(name) for name in _PLAIN_FIELDS))
    return key if all(value is None or type(value) is str for value in key) else None


def _filled(draft: Draft, version: ContextVersion, known: Sequence[Message]) -> ContextVersion:
    """The version with the draft's content. Known messages are reused as objects."""
    # By identity first: most messages are the same objects, and hashing them all takes longer.
    head, tail = equal_ends(known, draft.messages, operator.is_)
    stop = len(draft.messages) - tail
    inner, known = draft.messages[head:stop], known[head : len(known) - tail]
    here, there = set(map(id, inner)), set(map(id, known))
    same = {message: message for message in known if id(message) not in here}
    for index, message in enumerate(inner, head):
        if id(message) not in there and message not in same:
            # Message objects that the caller made himself have not been checked.
            check_text(encode_message(message), f"Message {index}")
    check_text(draft.author or "", "author")
    check_text(draft.checkpoint_id or "", "checkpoint_id")
    return replace(
        version,
        messages=(
            *draft.messages[:head],
            *(m if id(m) in there else same.setdefault(m, m) for m in inner),
            *draft.messages[stop:],
        ),
        tools=draft.tools,
        template_args=draft.template_args,
        author=draft.author,
        checkpoint_id=draft.checkpoint_id,
    )
