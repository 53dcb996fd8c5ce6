"""Index of a history's versions by what their messages say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from patchkv_agents.context.messages import Message
from patchkv_agents.context.versioning.history import ContextHistory
from patchkv_agents.context.versions import ContextVersion

_CONTENT_HASH = attrgetter("content_hash")


class VersionIndex:
    """Finds the versions of a history that have the same messages.

    Reads each version once. `refresh` costs one look at the branches while nobody else commits.
    Not safe to use from several threads.

    Attributes:
        history: the history.
    """

    def __init__(self, history: ContextHistory) -> None:
        self.history = history
        self._digests: dict[str, int] = {}  # of the messages, by version
        self._by_digest: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, version_id: object) -> bool:
        return version_id in self._digests

    def refresh(self) -> list[ContextVersion] | None:
        """Read the versions that others have committed.

        Returns:
            These versions, oldest first; None if the thread was deleted meanwhile, and this index
            with what it knows of it is of no use any more.
        """
        heads = self.history.branches().values()
        if all(head in self._digests for head in heads) and (heads or not self._digests):
            return []
        stored = self.history.version_ids()
        if not self._digests.keys() <= set(stored):
            return None
        added = [self.history.get(each) for each in stored if each not in self._digests]
        for version in added:
            self.add(version)
        return added

    def add(self, version: ContextVersion) -> None:
        """Enter a version; one that is there already is ignored."""
        if version.id not in self._digests:
            digest = self._digests[version.id] = _digest(version.messages)
            self._by_digest.setdefault(digest, []).append(version.id)

    def holds(self, version_id: str, messages: Sequence[Message]) -> bool:
        """Whether a version has exactly these messages."""
        if self._digests.get(version_id) != _digest(messages):
            return False
        return self.history.get(version_id).messages == tuple(messages)

    def equal(self, messages: Sequence[Message]) -> list[str]:
        """The versions with exactly these messages, oldest first."""
        alike = self._by_digest.get(_digest(messages), ())
        return [each for each in alike if self.holds(each, messages)]

    def child(self, parent: ContextVersion, messages: Sequence[Message]) -> ContextVersion | None:
        """The version with these messages that was made from `parent`, if there is one."""
        for each in self._by_digest.get(_digest(messages), ()):
            version = self.history.get(each)
            if version.parents[:1] == (parent.id,) and version.messages == tuple(messages):
                return version
        return None

    def heads(self) -> set[str]:
        """Ids of the newest versions of the branches."""
        return set(self.history.branches().values())

    def newest(self, count: int) -> list[str]:
        """Ids of the newest versions, newest first."""
        return sorted(self._digests, reverse=True)[:count]


def _digest(messages: Iterable[Message]) -> int:
    return hash(tuple(map(_CONTENT_HASH, messages)))
