"""Contexts as far as it takes to see which conversation they belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from patchkv_agents.context import ContextVersion, FrozenJson, Message
from patchkv_agents.context.texts import common_prefix

_PER_MESSAGE = 16  # characters that a template writes around a message, roughly
_RESTORED = 0.85  # of restoring instead of computing a row, the share of time that is saved
_SAME_TALK = 0.25
_UTILITY = 0.5


@dataclass(frozen=True, slots=True)
class Shape:
    """What a context is made of; sizes are in characters.

    Attributes:
        opening: tools and template arguments, as text.
        hashes: of the messages.
        sizes: of the messages.
        system: text of the system messages at the beginning.
        talk: index of the first message behind these.
        said: hashes of the messages from there on.
    """

    opening: str
    hashes: tuple[str, ...]
    sizes: tuple[int, ...]
    system: str
    talk: int
    said: frozenset[str]

    @classmethod
    def of(
        cls, messages: Sequence[Message], tools: Sequence[FrozenJson], template_args: FrozenJson
    ) -> Shape:
        """The shape of a context."""
        talk = 0
        while talk < len(messages) and messages[talk].role in ("system", "developer"):
            talk += 1
        hashes = tuple(message.content_hash for message in messages)
        return cls(
            opening="\n".join([*(tool.text for tool in tools), template_args.text]),
            hashes=hashes,
            sizes=tuple(map(_size, messages)),
            system="\n".join(message.text for message in messages[:talk]),
            talk=talk,
            said=frozenset(hashes[talk:]),
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
        """How much of this context another one begins with, in whole messages."""
        if self.opening != other.opening:
            return 0
        same = 0
        for mine, its in zip(self.hashes, other.hashes, strict=False):
            if mine != its:
                break
            same += 1
        return len(self.opening) + sum(self.sizes[:same])

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
        again = self._common(old, 0) - (beginning - len(self.opening) if beginning else 0)
        return left - _RESTORED * again

    def continues(self, old: Shape) -> bool:
        """Whether this is the conversation of `old`, gone on or edited.

        It is not where they have only the system prompt in common, or little else, or where
        another program asks something short about the conversation (as for a title).
        """
        if self.said.isdisjoint(old.said):  # most are, and this is fast
            return False
        mine, its = sum(self.sizes[self.talk :]), sum(old.sizes[old.talk :])
        common = self._common(old, self.talk)
        if common < _SAME_TALK * min(mine, its):
            return False
        is_short = self.size < _UTILITY * old.size
        return not is_short or _is_similar(self.system, old.system)

    def _common(self, old: Shape, start: int) -> int:
        """Size of the messages from `start` on that `old` has too, in any order."""
        there = Counter(old.hashes)
        common = 0
        for digest, size in zip(self.hashes[start:], self.sizes[start:], strict=True):
            if there[digest]:
                there[digest] -= 1
                common += size
        return common


def _size(message: Message) -> int:
    calls = sum(len(call.name) + len(call.arguments_json) for call in message.tool_calls)
    return len(message.text) + len(message.reasoning or "") + calls + _PER_MESSAGE


def _is_similar(a: str, b: str) -> bool:
    """Whether one text is the other with a part of less than half replaced."""
    start = common_prefix(a, b)
    end = common_prefix(a[start:][::-1], b[start:][::-1])
    return start + end >= max(len(a), len(b)) / 2
