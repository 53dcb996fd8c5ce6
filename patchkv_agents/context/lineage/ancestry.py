"""Ancestors of a version, and which of them an edit marked `forget` must not leave behind."""

from __future__ import annotations

from collections.abc import Iterator, Set

from patchkv_agents.context.versioning.views import HistoryView
from patchkv_agents.context.versions import ContextVersion
from patchkv_agents.errors import ContextError


def ancestry(history: HistoryView, version: ContextVersion) -> Iterator[ContextVersion]:
    """The version and those it came from (first parents), newest first."""
    yield version
    while version.parents:
        version = history.get(version.parents[0])
        yield version


class Ancestors:
    """Ids of the versions that one came from, itself included.

    Remembers the last answer, so that the next version of a branch costs one step.
    """

    def __init__(self) -> None:
        self._version = ""
        self._ids: set[str] = set()
        self._roots: set[str] = set()

    def copy(self) -> Ancestors:
        """A copy for a fork, with the same cuts."""
        other = Ancestors()
        other._roots = set(self._roots)
        return other

    def cut(self, version: str) -> None:
        """Make a version a root, whatever parents the history gives it."""
        self._roots.add(version)

    def of(self, history: HistoryView, version: ContextVersion) -> Set[str]:
        """Ids of the version and of all its ancestors. Valid until the next call."""
        if version.id != self._version:
            if version.parents != (self._version,) or version.id in self._roots:
                self._ids = set()
            pending = [version.id]
            while pending:
                current = pending.pop()
                if current not in self._ids:
                    self._ids.add(current)
                    if current in self._roots:
                        continue
                    pending += _parents(history, version if current == version.id else current)
            self._version = version.id
        return self._ids


def _parents(history: HistoryView, version: ContextVersion | str) -> tuple[str, ...]:
    if isinstance(version, ContextVersion):
        return version.parents
    try:
        return history.get(version).parents
    except ContextError:  # deleted by another process
        return ()


class ForgettingSearch:
    """Finds the newest version in an ancestry that was made by an edit marked `forget`.

    Remembers the last answer, so that the next version costs one step.
    """

    def __init__(self) -> None:
        self._known: tuple[str, ContextVersion | None] = ("", None)

    def newest(self, history: HistoryView, version: ContextVersion) -> ContextVersion | None:
        """The newest such version up to `version`, itself included; None if there is none."""
        found = None
        for past in ancestry(history, version):
            if past.id == self._known[0]:
                found = self._known[1]
                break
            if any(edit.forget for edit in past.edits):
                found = past
                break
        self._known = version.id, found
        return found


def came_after(history: HistoryView, version_id: str, forgetting: str) -> bool:
    """Whether a version is `forgetting` or came from it, so that its state never saw the text.

    False for a version that the history does not have.
    """
    pending, seen = [version_id], set()
    while pending:
        current = pending.pop()
        if current == forgetting:
            return True
        if current > forgetting and current not in seen:  # ids sort by time
            seen.add(current)
            try:
                pending += history.get(current).parents
            except ContextError:
                continue
    return False


def is_forgotten(history: HistoryView, version_id: str) -> bool:
    """Whether text of a version was forgotten later on, on any branch or in any related thread."""
    store = history.store
    for key in store.related(history.key):
        for later in reversed(store.version_ids(key)):
            if later <= version_id:  # ids sort by time
                break
            version = store.load(key, later)
            if version and version.forgotten and version_id in version.forgotten.versions:
                return True
    return False
