"""Which versions' state an edit marked `forget` must not leave behind."""

from __future__ import annotations

from collections.abc import Iterator

from patchkv_agents.context import ContextHistory, ContextVersion
from patchkv_agents.errors import ContextError


def ancestry(history: ContextHistory, version: ContextVersion) -> Iterator[ContextVersion]:
    """The version and those it came from (first parents), newest first."""
    yield version
    while version.parents:
        version = history.get(version.parents[0])
        yield version


class ForgettingSearch:
    """Finds the newest version in an ancestry that was made by an edit marked `forget`.

    Remembers the last answer, so that the next version costs one step.
    """

    def __init__(self) -> None:
        self._known: tuple[str, ContextVersion | None] = ("", None)

    def newest(self, history: ContextHistory, version: ContextVersion) -> ContextVersion | None:
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


def came_after(history: ContextHistory, version_id: str, forgetting: str) -> bool:
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


def is_forgotten(history: ContextHistory, version_id: str) -> bool:
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
