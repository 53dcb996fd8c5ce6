"""Opens one thread of a history file for the commands that read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchkv_agents.errors import InputError

if TYPE_CHECKING:
    from patchkv_agents.context import ContextVersion
    from patchkv_agents.context.stores import HistoryStore
    from patchkv_agents.context.versions import ThreadKey

_NAMED = 12  # threads or branches that an error lists

NamespaceOption = Annotated[
    str, typer.Option("--namespace", help="The part of the thread, such as a subagent's name.")
]


@dataclass(frozen=True, slots=True)
class ThreadReader:
    """The versions of one thread."""

    store: HistoryStore
    key: ThreadKey
    branches: dict[str, str]
    ids: tuple[str, ...]

    @property
    def name(self) -> str:
        """The thread's name, for people."""
        from patchkv_agents.context.excerpts import one_line

        return one_line(str(self.key), 80)

    def version(self, name: str) -> ContextVersion:
        """The version with an id or a unique start or end of one, or the newest of a branch.

        Raises:
            InputError: there is none, or there are several.
        """
        if name in self.branches:
            return self._load(self.branches[name])
        matches = [name] if name in self.ids else []
        if not matches and name:
            matches = [id for id in self.ids if id.startswith(name) or id.endswith(name)]
        if len(matches) == 1:
            return self._load(matches[0])
        if matches:
            raise InputError(
                f"{len(matches)} versions of thread {self.name} begin or end with {name!r}: give "
                "more of the id"
            )
        raise InputError(
            f"thread {self.name} has no version and no branch {name!r}. Its branches: "
            f"{_names(sorted(self.branches))}; `patchkv log` lists its versions"
        )

    def newest(self, branch: str | None) -> ContextVersion:
        """The newest version of a branch; of `main`, or the newest of all, if none is named.

        Raises:
            InputError: there is no such branch.
        """
        if branch is None:
            return self._load(self.branches.get("main", self.ids[-1]))
        if branch not in self.branches:
            raise InputError(
                f"thread {self.name} has no branch {branch!r}. Its branches: "
                f"{_names(sorted(self.branches))}"
            )
        return self._load(self.branches[branch])

    def ancestors(self, version: ContextVersion) -> Iterator[ContextVersion]:
        """A version and its ancestors, newest first."""
        wanted = {version.id}
        for id in reversed(self.ids):
            if id in wanted:
                ancestor = self._load(id)
                wanted.update(ancestor.parents)
                yield ancestor

    def all(self) -> Iterator[ContextVersion]:
        """All versions, newest first."""
        return (self._load(id) for id in reversed(self.ids))

    def branches_at(self, version: ContextVersion) -> list[str]:
        """The branches whose newest version this is."""
        return sorted(name for name, id in self.branches.items() if id == version.id)

    def _load(self, id: str) -> ContextVersion:
        version = self.store.load(self.key, id)
        if version is None:  # deleted by another process meanwhile
            raise InputError(f"thread {self.name} has no version {id} any more: try again")
        return version


@contextmanager
def open_thread(database: Path, thread: str, namespace: str) -> Iterator[ThreadReader]:
    """Open a history file for reading and look up a thread.

    Raises:
        InputError: there is no such file or no such thread; with those that there are.
        HistoryStoreError: the file is no history, or is damaged.
    """
    from patchkv_agents.context.versions import ThreadKey

    with open_store(database) as store:
        key = ThreadKey(thread, namespace)
        ids = store.version_ids(key)
        if not ids:
            threads = store.threads()
            raise InputError(
                f"{database} has no thread {key}. "
                + (
                    f"It has {_names([_flags(each) for each in threads])}"
                    if threads
                    else "It has no threads yet"
                )
            )
        yield ThreadReader(store, key, store.branches(key), ids)


@contextmanager
def open_store(database: Path) -> Iterator[HistoryStore]:
    """Open a history file for reading.

    Raises:
        InputError: there is no such file.
        HistoryStoreError: the file is no history, or is damaged.
    """
    from patchkv_agents.context.stores.sqlite import SQLiteHistoryStore

    if not database.exists():
        raise InputError(f"there is no file {database}: check the path")
    with SQLiteHistoryStore(database, mode="r") as store:
        yield store


def _flags(key: ThreadKey) -> str:
    return f"{key.thread} --namespace {key.namespace}" if key.namespace else key.thread


def _names(names: list[str]) -> str:
    more = len(names) - _NAMED
    shown = ", ".join(names[:_NAMED]) or "none"
    return f"{shown} and {more:,} more" if more > 0 else shown
