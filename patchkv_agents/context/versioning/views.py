"""Read access to the versions of a thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from patchkv_agents.context.changes.inference import infer_edits
from patchkv_agents.context.edits import Edit
from patchkv_agents.context.lineage.forms import MessageForm, forms
from patchkv_agents.context.versioning.targets import Target, find
from patchkv_agents.context.versions import ContextVersion, ThreadKey
from patchkv_agents.errors import ContextError

if TYPE_CHECKING:
    from patchkv_agents.context.stores.base import HistoryStore

Ref = str | ContextVersion
"""A version: itself, its id, or the name of a branch for the newest one there."""


class HistoryView:
    """Read-only view of a history; `ContextHistory` adds changes.

    Attributes:
        store: where the versions are.
        key: the thread.
    """

    def __init__(self, store: HistoryStore, key: ThreadKey) -> None:
        self.store = store
        self.key = key
        self._head: ContextVersion | None = None

    def __len__(self) -> int:
        return len(self.version_ids())

    def __contains__(self, version_id: object) -> bool:
        return isinstance(version_id, str) and self.store.load(self.key, version_id) is not None

    @property
    def head(self) -> ContextVersion | None:
        """The version that this object works on, as it was read; None before the first commit."""
        return self._head

    def branches(self) -> dict[str, str]:
        """Id of the newest version of each branch, by the branch's name."""
        return self.store.branches(self.key)

    def version_ids(self) -> tuple[str, ...]:
        """Ids of the versions of all branches, in the order in which they were stored."""
        return self.store.version_ids(self.key)

    def get(self, ref: Ref) -> ContextVersion:
        """The version of that id, or the newest one of the branch of that name.

        It is read from the store, also if a version is given: text may have been forgotten since.

        Raises:
            ContextError: there is none.
        """
        version_id = ref.id if isinstance(ref, ContextVersion) else ref
        version = self.store.load(self.key, version_id)
        if version is None:  # only now, since most ask for an id, and often
            heads = self.branches()
            version_id = heads.get(version_id, version_id)
            version = self.store.load(self.key, version_id)
        if version is None:
            last = f"the present one is {self._head.id!r}" if self._head else "the history is empty"
            names = f"; branches: {', '.join(map(repr, heads))}" if heads else ""
            raise ContextError(
                f"There is no version {version_id!r} among {len(self)} ({last}{names}); see log()."
            )
        return version

    def show(self, ref: Ref | None = None) -> ContextVersion:
        """As `get`; `head` by default."""
        return self.get(self._present() if ref is None else ref)

    def log(self, ref: Ref | None = None) -> tuple[ContextVersion, ...]:
        """A version (by default `head`) and its ancestors, newest first.

        Of a version with several parents, the first one is followed.
        """
        if ref is None and self._head is None:
            return ()
        return tuple(self._line(self.show(ref)))

    def diff(self, old: Ref, new: Ref) -> tuple[Edit, ...]:
        """The edits that lead from one version to another, whether or not one follows the other.

        Raises:
            ContextError: an id is not known.
        """
        return infer_edits(self.get(old), self.get(new))

    def blame(self, target: Target, ref: Ref | None = None) -> tuple[MessageForm, ...]:
        """The origin of a message: each of its forms, and the edit that made it.

        Args:
            target: the message's index, its id, or the tool_call_id it answers.
            ref: the version to look at; `head` by default.

        Returns:
            The present form first, then the earlier ones; for a summary, all messages that went
            into it.

        Raises:
            ContextError: there is no such message or version.
        """
        version = self.show(ref)
        return tuple(forms(version, find(version.messages, target), self._parent_of))

    def _present(self) -> ContextVersion:
        if self._head is None:
            raise ContextError("The history is empty; commit messages first.")
        return self._head

    def _parent_of(self, version: ContextVersion) -> ContextVersion | None:
        return self.get(version.parents[0]) if version.parents else None

    def _line(self, start: ContextVersion) -> Iterator[ContextVersion]:
        version: ContextVersion | None = start
        while version is not None:
            yield version
            version = self._parent_of(version)
