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


class ForgettingLine:
    """Finds the newest version in an ancestry that was made by an edit marked `forget`.

    Remembers what it found, so that the next version costs one step.
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

    False for a version that the history does not know.
    """
    pending, seen = [version_id], set()
    while pending:
        found = pending.pop()
        if found == forgetting:
            return True
        if found not in seen:
            seen.add(found)
            try:
                pending += history.get(found).parents
            except ContextError:
                continue
    return False
