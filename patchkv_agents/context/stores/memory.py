"""A store in the memory of one process."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import RLock

from patchkv_agents.context.messages import Message
from patchkv_agents.context.sequences import equal_ends
from patchkv_agents.context.stores.base import Rewrite
from patchkv_agents.context.stores.splices import LONGEST_CHAIN, Splice, spliced, splices
from patchkv_agents.context.versions import ContextVersion, ThreadKey
from patchkv_agents.errors import HistoryStoreError

# Versions that are kept whole, beside the splices of all.
_WHOLE_VERSIONS = 16


@dataclass(frozen=True, slots=True)
class _Entry:
    """A version without its messages, which are `changes` of those of its base."""

    version: ContextVersion
    base: str | None
    depth: int
    changes: tuple[Splice[Message], ...]


@dataclass(slots=True)
class _Family:
    """A thread and its forks, which share versions."""

    entries: dict[str, _Entry] = field(default_factory=dict)
    members: dict[ThreadKey, dict[str, None]] = field(default_factory=dict)
    branches: dict[ThreadKey, dict[str, str]] = field(default_factory=dict)
    messages: dict[Message, Message] = field(default_factory=dict)
    whole: OrderedDict[str, ContextVersion] = field(default_factory=OrderedDict)

    def copy(self) -> _Family:
        return _Family(
            dict(self.entries),
            {key: dict(ids) for key, ids in self.members.items()},
            {key: dict(heads) for key, heads in self.branches.items()},
            dict(self.messages),
        )


class MemoryHistoryStore:
    """A history store in memory; versions share messages. See `HistoryStore`."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._families: dict[ThreadKey, _Family] = {}

    def threads(self) -> tuple[ThreadKey, ...]:
        """All threads, sorted."""
        with self._lock:
            return tuple(sorted(self._families))

    def related(self, thread: ThreadKey) -> tuple[ThreadKey, ...]:
        """The thread and those that share versions with it."""
        with self._lock:
            family = self._families.get(thread)
            return tuple(sorted(family.members)) if family else ()

    def branches(self, thread: ThreadKey) -> dict[str, str]:
        """Newest version of each branch."""
        with self._lock:
            family = self._families.get(thread)
            return dict(family.branches[thread]) if family else {}

    def version_ids(self, thread: ThreadKey) -> tuple[str, ...]:
        """Ids of the thread's versions."""
        with self._lock:
            family = self._families.get(thread)
            return tuple(family.members[thread]) if family else ()

    def load(self, thread: ThreadKey, version_id: str) -> ContextVersion | None:
        """A version of the thread."""
        with self._lock:
            family = self._families.get(thread)
            if family is None or version_id not in family.members[thread]:
                return None
            return _whole(family, version_id)

    @contextmanager
    def writing(self, thread: ThreadKey) -> Iterator[None]:
        """One transaction."""
        with self._lock:
            families = dict(self._families)
            family = self._families.get(thread)
            before = family and family.copy()
            try:
                yield
            except BaseException:
                self._families = families
                if before:
                    for key in before.members:
                        families[key] = before
                raise

    def put(self, thread: ThreadKey, version: ContextVersion, branch: str) -> None:
        """Make a version the newest of a branch."""
        family = self._families.get(thread)
        if family is None:
            family = self._families[thread] = _Family()
            family.members[thread], family.branches[thread] = {}, {}
        if version.id not in family.members[thread]:
            _add(family, version)
            family.members[thread][version.id] = None
        family.branches[thread][branch] = version.id

    def fork(self, source: ThreadKey, target: ThreadKey) -> None:
        """Make a new thread with the versions of another."""
        family = self._families.get(source)
        if family is None:
            raise HistoryStoreError(f"There is no thread {source} to fork; commit to it first.")
        if target in self._families:
            raise HistoryStoreError(f"There is a thread {target} already; choose another name.")
        family.members[target] = dict(family.members[source])
        family.branches[target] = dict(family.branches[source])
        self._families[target] = family

    def rewrite(self, thread: ThreadKey, change: Rewrite) -> None:
        """Replace versions by other contents."""
        family = self._families[thread]
        _refill(family, change([_whole(family, version_id) for version_id in family.entries]))

    def delete(self, thread: ThreadKey) -> None:
        """Remove a thread."""
        family = self._families.pop(thread, None)
        if family is None:
            return
        del family.members[thread], family.branches[thread]
        left = {version_id for ids in family.members.values() for version_id in ids}
        _refill(family, [_whole(family, each) for each in family.entries if each in left])

    def erase(self) -> bool:
        """Nothing is left: there are no files."""
        return True

    def close(self) -> None:
        """Nothing to release."""


def _refill(family: _Family, versions: Sequence[ContextVersion]) -> None:
    family.entries, family.messages = {}, {}
    family.whole.clear()
    for version in versions:
        _add(family, version)


def _add(family: _Family, version: ContextVersion) -> None:
    parent = version.parents[0] if version.parents else ""
    base = family.entries.get(parent)
    before = _whole(family, parent).messages if base else ()
    # Those that the parent has at its ends are in the family; of the others, an equal one may be.
    head, tail = equal_ends(before, version.messages, operator.is_)
    stop = len(version.messages) - tail
    messages = (
        *version.messages[:head],
        *(family.messages.setdefault(each, each) for each in version.messages[head:stop]),
        *version.messages[stop:],
    )
    if base is None or base.depth == LONGEST_CHAIN:
        whole = ((0, 0, messages),)
        entry = _Entry(replace(version, messages=()), None, 0, whole)
    else:
        changes = splices(before, messages)
        entry = _Entry(replace(version, messages=()), parent, base.depth + 1, changes)
    family.entries[version.id] = entry
    _remember(family, replace(version, messages=messages))


def _whole(family: _Family, version_id: str) -> ContextVersion:
    """The version with its messages."""
    chain: list[_Entry] = []
    messages: tuple[Message, ...] = ()
    at: str | None = version_id
    while at is not None:
        if at in family.whole:
            messages = family.whole[at].messages
            break
        chain.append(family.entries[at])
        at = chain[-1].base
    for entry in reversed(chain):
        messages = spliced(messages, entry.changes)
        _remember(family, replace(entry.version, messages=messages))
    family.whole.move_to_end(version_id)
    return family.whole[version_id]


def _remember(family: _Family, version: ContextVersion) -> None:
    family.whole[version.id] = version
    if len(family.whole) > _WHOLE_VERSIONS:
        family.whole.popitem(last=False)
