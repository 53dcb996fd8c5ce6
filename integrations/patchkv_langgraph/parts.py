"""Keys of a graph's state as parts of the context: what is recorded of them, and as which edits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_messages

from patchkv_agents.context import Edit, EditKind, Message, infer_edits
from patchkv_agents.context.versioning.declarations import is_possible
from patchkv_langgraph.marks import marked_edits
from patchkv_langgraph.recordable import plain_text
from patchkv_langgraph.snapshots import Snapshots

Renderer = Callable[[Any], str | Sequence[str]]
"""Makes text of a key's value, or one text for each of its items."""

_PLANS = ("plan", "todo")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The value of a key at one moment.

    Attributes:
        values: its messages, as a history stores them.
        natives: the same in LangChain's form; empty for a part that has no messages.
        problems: what of it had to be replaced.
    """

    values: tuple[Message, ...] = ()
    natives: tuple[BaseMessage, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StatePart:
    """How a key of the state that holds no messages is recorded: a plan, notes, a document.

    Attributes:
        render: makes text of the value. Left out: text as it is; lists item by item, everything
            else as JSON.
        kind: what its edits are. Left out: `revise_plan` where the key's name has `plan` or `todo`
            in it, else `other`.
    """

    render: Renderer | None = None
    kind: EditKind | str | None = None


@dataclass(frozen=True, slots=True)
class ContextPart:
    """A key of the state that is recorded.

    Attributes:
        key: the key.
        state_part: how it is rendered; None for messages.
        kind: what edits of it are, as far as marks do not tell; None: seen from the change.
    """

    key: str
    state_part: StatePart | None
    kind: EditKind | None

    def take(self, value: Any, snapshots: Snapshots) -> Snapshot:
        """The present value of the key. Nothing that is passed in changes."""
        if value is None:
            return Snapshot()
        if self.state_part is None:
            natives = _messages(value)
            if natives is not None:
                values, problems = snapshots.take(natives)
                return Snapshot(values, tuple(natives), tuple(problems))
        render = self.state_part.render if self.state_part else None
        shown = value if render is None else render(value)
        if isinstance(shown, str) or not isinstance(shown, list | tuple):
            return Snapshot((self._message(shown, self.key),))
        # Items have no ids: by their places, all behind an inserted one would be edited.
        return Snapshot(tuple(self._message(item, None) for item in shown))

    def _message(self, value: Any, message_id: str | None) -> Message:
        text = value if isinstance(value, str) else json.dumps(_json(value), ensure_ascii=False)
        return Message("user", plain_text(text), name=self.key, id=message_id)

    def declare(self, old: Snapshot, new: Snapshot, author: str) -> list[Edit]:
        """The edits that marks, the kind or the part tell of."""
        edits = list(marked_edits(old.natives, new.natives, author=author))
        if self.kind is None:
            return edits
        if not new.natives and not old.natives:
            return _of_kind(self.kind, old.values, new.values, author)
        return edits + _changed(self.kind, old.values, new.values, author, edits)


def _of_kind(
    kind: EditKind, old: Sequence[Message], new: Sequence[Message], author: str
) -> list[Edit]:
    """All changes as edits of one kind, as far as they can be."""
    return [
        Edit.declare(kind, old=edit.old_indices, new=edit.new_indices, author=author)
        for edit in infer_edits(old, new)
        if is_possible(kind, edit)
    ]


def _changed(
    kind: EditKind,
    old: Sequence[Message],
    new: Sequence[Message],
    author: str,
    marked: Iterable[Edit],
) -> list[Edit]:
    """Edits of one kind for the messages that were there before and changed or went."""
    told = {name for edit in marked for name in edit.message_ids}
    before = {message.id: message for message in old if message.id is not None}
    after = {message.id: message for message in new if message.id is not None}
    changed = [
        name
        for name, message in before.items()
        if name not in told
        and (name not in after or after[name].content_hash != message.content_hash)
    ]
    if kind is EditKind.SUMMARIZE and changed:
        came = [name for name in after if name not in before]
        return [Edit.declare(kind, message_ids=(*changed, *came), author=author)]
    return [Edit.declare(kind, message_ids=(name,), author=author) for name in changed]


def _messages(value: Any) -> list[BaseMessage] | None:
    """The messages of a value in LangChain's form; None if it holds something else."""
    if not isinstance(value, list | tuple):
        return None
    if all(issubclass(kind, BaseMessage) for kind in set(map(type, value))):
        return list(value)
    try:
        return convert_to_messages(value)
    except Exception:  # which ones it raises depends on what it was given
        return None


def _json(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return _json(value.model_dump())
    if is_dataclass(value) and not isinstance(value, type):
        return _json(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_json(item) for item in value), key=repr)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def default_kind(key: str) -> EditKind:
    """What edits of a state's key are, if nobody says."""
    is_plan = any(word in key.lower() for word in _PLANS)
    return EditKind.REVISE_PLAN if is_plan else EditKind.OTHER
