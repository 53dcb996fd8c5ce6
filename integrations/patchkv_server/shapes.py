"""Sketches of contexts: enough to see which conversation a request continues, without its text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from patchkv_agents.context import ContextVersion, FrozenJson, Message
from patchkv_agents.context.explaining.volatile import volatile_change
from patchkv_agents.context.texts import common_prefix, text_similarity

CHARACTERS_PER_MESSAGE = 16
"""What a template writes around a message, roughly."""
RESTORED_SAVING = 0.85
"""Share of a row's compute time that restoring it saves."""
MIN_SHARE = 0.5
"""Share of the new context that has to be in the old one."""
MIN_SHARE_WITH_END = 0.2
"""The same where the old context's last messages are in the new one, as after a compaction."""
MIN_SIMILARITY = 0.75
"""Of two system prompts, one of which is an edit of the other."""
MIN_COMMON_BEGINNING = 0.9
"""Share of the old talk that has to stay where its end is another one, such as a reminder."""
_SYSTEM = ("system", "developer")
_ANSWERS = ("assistant", "tool", "function")


class Agreement(IntEnum):
    """How much two system prompts, or two lists of tools, have in common."""

    DIFFERENT = 0
    EDITED = 1
    SAME_BUT_TIMES = 2
    SAME = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """What a context is made of; sizes are in characters.

    Attributes:
        opening: tools and template arguments, as text.
        tools: names of the tools.
        system: text of the system messages at the beginning.
        head: number of these messages.
        hashes, sizes, roles: of all messages.
        talk, talk_sizes, talk_roles: hashes, sizes and roles of the messages that are not the
            system's. Some programs write the same system messages into every conversation.
    """

    opening: str
    tools: frozenset[str]
    system: str
    head: int
    hashes: tuple[str, ...]
    sizes: tuple[int, ...]
    roles: tuple[str, ...]
    talk: tuple[str, ...]
    talk_sizes: tuple[int, ...]
    talk_roles: tuple[str, ...]

    @classmethod
    def of(
        cls, messages: Sequence[Message], tools: Sequence[FrozenJson], template_args: FrozenJson
    ) -> Shape:
        """The shape of a context."""
        head = 0
        while head < len(messages) and messages[head].role in _SYSTEM:
            head += 1
        talk = [message for message in messages if message.role not in _SYSTEM]
        return cls(
            opening="\n".join([*(tool.text for tool in tools), template_args.text]),
            tools=frozenset(_name(tool.load()) for tool in tools),
            system="\n".join(message.text for message in messages[:head]),
            head=head,
            hashes=tuple(message.content_hash for message in messages),
            sizes=tuple(map(_size, messages)),
            roles=tuple(message.role for message in messages),
            talk=tuple(message.content_hash for message in talk),
            talk_sizes=tuple(map(_size, talk)),
            talk_roles=tuple(message.role for message in talk),
        )

    @classmethod
    def of_version(cls, version: ContextVersion) -> Shape:
        """The shape of a context version."""
        return cls.of(version.messages, version.tools, version.template_args)

    @property
    def size(self) -> int:
        """Of everything."""
        return len(self.opening) + sum(self.sizes)

    def common_beginning(self, other: Shape) -> int:
        """How much of this context another one begins with.

        In whole messages, but for the first one: programs begin their system prompts alike.
        """
        if self.opening != other.opening:
            return 0
        same = _common_prefix(self.hashes, other.hashes)
        begun = common_prefix(self.system, other.system) if same < self.head else 0
        return len(self.opening) + max(sum(self.sizes[:same]), begun)

    def left_after(self, old: Shape, *, exact: bool) -> float:
        """How much of this context is left to compute by what there is of `old`.

        Args:
            old: the context whose state there is.
            exact: only the common beginning can be reused.
        """
        beginning = self.common_beginning(old)
        left = float(self.size - beginning)
        if exact:
            return left
        shared = _shared(self.hashes, old.hashes)
        common = sum(size for size, both in zip(self.sizes, shared, strict=True) if both)
        return left - RESTORED_SAVING * max(0, common - max(0, beginning - len(self.opening)))

    def is_next_turn(self, old: Shape) -> bool:
        """Whether this is `old`, its answer, and what was said or found after that."""
        count = len(old.hashes)
        return (
            self.opening == old.opening
            and self.hashes[:count] == old.hashes
            and self.roles[count:].count("assistant") == 1
            and self.roles[count] == "assistant"
        )

    def continues(self, old: Shape) -> bool:
        """Whether this is the conversation of `old`, gone on or edited.

        It goes on, or goes back, where one begins with the whole of the other. It is edited where
        a large share of it is in `old`, some of that behind the first difference: else nothing is
        lost if it becomes a conversation of its own with a copy of the common beginning. Where
        system prompt or tools differ, they have to be edited recognizably, and an answer or a
        tool's result has to be in both: programs are asked the same things.
        """
        if set(self.talk).isdisjoint(old.talk):  # most are, and this is fast
            return False
        system = self._system_agreement(old)
        preamble = min(system, self._tool_agreement(old))
        shared = _shared(self.talk, old.talk)
        if preamble is Agreement.SAME:
            return self._goes_on(old) or self._is_edited(old, shared)
        has_answer = any(
            both and role in _ANSWERS for both, role in zip(shared, self.talk_roles, strict=True)
        )
        if not has_answer:
            return False
        if preamble is Agreement.DIFFERENT:  # may be cut at the front, system prompt included
            return not self.head and all(shared) and self.opening == old.opening
        if system is Agreement.EDITED and not self._has_end_of(old, grown=True):
            return False  # another role that is asked the same looks like this too
        return self._has_most(old, shared)

    def _goes_on(self, old: Shape) -> bool:
        """Whether one begins with the other, or their ends alone differ, and shortly."""
        same = _common_prefix(self.talk, old.talk)
        if same == min(len(self.talk), len(old.talk)):
            return True
        has_answer = any(role in _ANSWERS for role in old.talk_roles[:same])
        sizes = old.talk_sizes
        return has_answer and sum(sizes[:same]) >= MIN_COMMON_BEGINNING * sum(sizes)

    def _is_edited(self, old: Shape, shared: Sequence[bool]) -> bool:
        same = _common_prefix(self.talk, old.talk)
        # Else nothing could be restored.
        return any(shared[same:]) and self._has_most(old, shared)

    def _has_most(self, old: Shape, shared: Sequence[bool]) -> bool:
        """Whether enough of the talk is in the old one; what was only appended does not count.

        Less is enough where the old one's end is here. Where it is not, this has to be most of the
        old one too: episodes of one program look the same things up.
        """
        end = max((index + 1 for index, both in enumerate(shared) if both), default=0)
        sizes = self.talk_sizes[:end]
        common = sum(size for size, both in zip(sizes, shared[:end], strict=True) if both)
        if self._has_end_of(old):
            return common >= MIN_SHARE_WITH_END * sum(sizes)
        return common >= MIN_SHARE * max(sum(sizes), sum(old.talk_sizes))

    def _has_end_of(self, old: Shape, *, grown: bool = False) -> bool:
        """Whether the last two messages of `old` are here, and `grown`: with more behind them."""
        end = old.talk[-2:]
        stop = len(self.talk) - len(end) + (0 if grown else 1)
        return any(self.talk[start : start + len(end)] == end for start in range(max(0, stop)))

    def _system_agreement(self, old: Shape) -> Agreement:
        if self.system == old.system:
            return Agreement.SAME
        if not self.system or not old.system:
            return Agreement.DIFFERENT
        change = volatile_change(old.system, self.system)
        if change is not None and change.what == "a time or date":
            return Agreement.SAME_BUT_TIMES
        is_edit = text_similarity(self.system, old.system) >= MIN_SIMILARITY
        return Agreement.EDITED if is_edit else Agreement.DIFFERENT

    def _tool_agreement(self, old: Shape) -> Agreement:
        if self.opening == old.opening:
            return Agreement.SAME
        if self.tools == old.tools:  # in another order, or their descriptions changed
            return Agreement.SAME_BUT_TIMES
        both, either = len(self.tools & old.tools), len(self.tools | old.tools)
        is_edit = 2 * both >= either or not (self.tools and old.tools)
        return Agreement.EDITED if is_edit else Agreement.DIFFERENT


def _shared(mine: Sequence[str], its: Sequence[str]) -> list[bool]:
    """Which of one's messages the other has too, in any order."""
    there = Counter(its)
    shared = []
    for digest in mine:
        shared.append(there[digest] > 0)
        there[digest] -= 1
    return shared


def _common_prefix(mine: Sequence[str], its: Sequence[str]) -> int:
    pairs = enumerate(zip(mine, its, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(mine), len(its)))


def _size(message: Message) -> int:
    calls = sum(len(call.name) + len(call.arguments_json) for call in message.tool_calls)
    return len(message.text) + len(message.reasoning or "") + calls + CHARACTERS_PER_MESSAGE


def _name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    named = function if isinstance(function, dict) else tool
    return str(named.get("name", "")) if isinstance(named, dict) else ""
