"""The history of a context: every change creates a new version, linked to its parents."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any

from patchkv_agents.context.edits import Edit
from patchkv_agents.context.frozen import FrozenJson, IdSource, check_text
from patchkv_agents.context.messages import Message
from patchkv_agents.context.parsing import parse_messages, parse_template_args, parse_tools
from patchkv_agents.context.stores.memory import MemoryHistoryStore
from patchkv_agents.context.versioning.drafts import (
    Draft,
    Drafted,
    first_version,
    next_version,
    recognized,
)
from patchkv_agents.context.versioning.forgetting import forget
from patchkv_agents.context.versioning.operations import Change, TrackedOperations
from patchkv_agents.context.versioning.views import HistoryView, Ref
from patchkv_agents.context.versions import ContextVersion, ThreadKey
from patchkv_agents.errors import ConflictError, ContextError, HistoryStoreError

if TYPE_CHECKING:
    from patchkv_agents.context.stores.base import HistoryStore


class ContextHistory(HistoryView, TrackedOperations):
    """The versions of one thread's context, in a store.

    Arguments are copied; versions never change (except that `forget` removes text from them).
    `head` is the version that this object works on: the newest one of its branch when it was
    opened, checked out or last changed through this object. With other writers on the store,
    `commit` continues from the newest version, while operations on single messages raise
    `ConflictError` if the branch has advanced; `refresh` updates `head`.

    Thread-safe.

    Args:
        store: the store of the versions; a new one in memory by default.
        thread: the thread's name in the store. The first commit creates it.
        namespace: the part of the thread, such as a subagent's name.
        branch: the branch to work on.
        clock_ns: nanoseconds since the epoch, for ids and times.

    Raises:
        ContextError: the thread exists and has no such branch; or a name is not text.
        HistoryStoreError: the store cannot be read.
    """

    def __init__(
        self,
        store: HistoryStore | None = None,
        *,
        thread: str = "thread",
        namespace: str = "",
        branch: str = "main",
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        chosen = MemoryHistoryStore() if store is None else store
        super().__init__(chosen, ThreadKey(thread, namespace))
        self._clock_ns = clock_ns
        self._ids = IdSource(clock_ns)
        self._lock = RLock()
        self._branch: str | None = _name(branch)
        self._recorded: tuple[str, set[tuple[str, bool]]] = ("", set())
        if self.store.branches(self.key):
            self.checkout(branch)

    @property
    def branch_name(self) -> str | None:
        """The branch that this object works on; None where an older version is checked out."""
        return self._branch

    def commit(
        self,
        messages: Sequence[Mapping[str, Any] | Message],
        *,
        tools: Iterable[Mapping[str, Any] | FrozenJson] | None = None,
        template_args: Mapping[str, Any] | FrozenJson | None = None,
        edits: Iterable[Edit] | None = None,
        author: str | None = None,
        parent: Ref | None = None,
        branch: str | None = None,
        merged: Iterable[Ref] = (),
        checkpoint_id: str | None = None,
    ) -> ContextVersion:
        """Commit a context as the newest version.

        Args:
            messages: the whole list, as for `parse_messages`.
            tools: the tool schemas; none by default, whatever the previous version had.
            template_args: arguments of the chat template; none if left out.
            edits: edits that the caller declares (`Edit.declare`). All others are inferred, and
                messages and hashes always follow the actual change. A declaration without a
                matching change is recorded, unless it repeats an edit of an earlier version, as
                programs do that derive the same change again for each call.
            author: who made the change (a tool, node or middleware); also set on edits without one.
            parent: the parent version. If it is the newest one of a branch, the commit extends that
                branch; otherwise it starts a new one. The empty string means no parent: the
                version is the first of a new branch.
            branch: the branch to extend or to start; by default the current one, or that of
                `parent`.
            merged: further parents whose content went into this version, such as the last version
                of a subagent's branch that was summarised.
            checkpoint_id: the agent framework's checkpoint that this context belongs to.

        Returns:
            The new version, or its parent if nothing differs from it. An edit declared with
            `forget` always makes a version, of the same messages if need be: the earlier forms of
            the messages that it names are removed.

        Raises:
            ContextError: something has the wrong shape, or a declared edit names no message.
            ConflictError: `parent` is not the newest version of `branch`, or the thread is gone.
            HistoryStoreError: the store cannot be written. Nothing was committed.
        """
        head = self._head
        draft = Draft(
            messages=parse_messages(recognized(messages, head.messages if head else ())),
            tools=parse_tools(tools),
            template_args=parse_template_args(template_args),
            declared=_declared(edits),
            author=author,
            checkpoint_id=checkpoint_id,
        )
        with self._lock:
            with self.store.writing(self.key):
                base, name = self._place(parent, branch)
                seen = base if parent is not None or branch else self._head
                draft = draft.with_merged(self.get(ref).id for ref in merged)
                drafted = self._put(draft, base, seen or base, name)
            return self._done(drafted, name)

    def _apply(
        self, make: Callable[[ContextVersion], Change], author: str | None
    ) -> ContextVersion:
        with self._lock:
            head = self._present()
            with self.store.writing(self.key):
                base, name = self._place(head if self._branch is None else None, None)
                if base is None or base.id != head.id:
                    raise ConflictError(
                        f"Branch {name!r} of {self.key} has moved on from version {head.id}: "
                        "another writer committed to it. Call refresh(), look at head, and repeat."
                    )
                # Not of `head`: text may have been forgotten since that was read.
                change = make(base)
                like = change.like or base
                draft = Draft(
                    messages=parse_messages(change.messages),
                    tools=tuple(map(change.scrubber.frozen, like.tools)),
                    template_args=change.scrubber.frozen(like.template_args),
                    declared=change.edits,
                    author=author,
                    scrubber=change.scrubber,
                    targets=change.targets,
                )
                drafted = self._put(draft, base, base, name)
            return self._done(drafted, name)

    def revert(self, to: Ref | None = None, *, author: str | None = None) -> ContextVersion:
        """Commit the content of an earlier version again, as a new version.

        Its edits are inferred.

        Args:
            to: the earlier version; the present one's parent if left out.
            author: who made the change.

        Raises:
            ContextError: there is no such version.
            ConflictError: another writer has moved the branch on.
        """
        head = self.show()
        if to is None and not head.parents:
            raise ContextError("This is the first version; there is nothing to go back to.")
        target = self.get(head.parents[0] if to is None else to)

        def make(_: ContextVersion) -> Change:
            earlier = self.get(target)
            return Change(earlier.messages, like=earlier)

        return self._apply(make, author)

    def branch(self, name: str, at: Ref | None = None) -> ContextVersion:
        """Create a branch at a version, by default at `head`. `checkout` switches to it.

        Raises:
            ContextError: the name is taken, or there is no such version.
        """
        with self._lock, self.store.writing(self.key):
            version = self.show(at)
            if _name(name) in self.branches():
                raise ContextError(f"There is a branch {name!r} already; choose another name.")
            self.store.put(self.key, version, name)
            return version

    def checkout(self, ref: Ref) -> ContextVersion:
        """Switch to the newest version of a branch, or to any version.

        A commit on a version that is not the newest one of a branch starts a new branch.

        Raises:
            ContextError: there is no such branch or version.
        """
        with self._lock:
            heads = self.branches()
            version = self.get(ref)
            name = ref if isinstance(ref, str) and ref in heads else None
            self._branch = name or self._branch_at(version, heads)
            self._head = version
            return version

    def refresh(self) -> ContextVersion | None:
        """Update `head` to the newest version of the branch, with other writers' commits."""
        with self._lock:
            if self._branch in self.branches():
                self._head = self.get(self._branch)
            elif self._head is not None:
                self._head = self.store.load(self.key, self._head.id)
            return self._head

    def fork(self, thread: str | None = None, *, namespace: str = "") -> ContextHistory:
        """Create a new thread in the same store with the versions so far.

        The threads share versions: text that is forgotten in one is forgotten in the other.

        Args:
            thread: the new thread's name; generated by default.
            namespace: its namespace.

        Raises:
            HistoryStoreError: there is such a thread already.
        """
        with self._lock:
            name = thread or f"{self.key.thread}/{self._ids.next()}"
            if self.store.branches(key := ThreadKey(name, namespace)):
                raise HistoryStoreError(f"There is a thread {key} already; choose another name.")
            other = ContextHistory(
                self.store, thread=name, namespace=namespace, clock_ns=self._clock_ns
            )
            if self._head is not None:
                with self.store.writing(self.key):
                    self.store.fork(self.key, other.key)
                other._head = self._head
            other._branch = self._branch
            return other

    def delete_thread(self) -> None:
        """Remove this thread from the store. Versions that forks share stay with them."""
        with self._lock:
            with self.store.writing(self.key):
                self.store.delete(self.key)
            self.store.erase()
            self._head, self._branch, self._recorded = None, self._branch or "main", ("", set())

    def finish_forgetting(self) -> bool:
        """Try again to clean the store's files of forgotten text.

        Returns:
            Whether nothing of it is left there. If not, another process still reads the files.
        """
        return self.store.erase()

    def _branch_at(self, version: ContextVersion, heads: Mapping[str, str]) -> str | None:
        """The branch whose newest version it is, the present one if there are several."""
        names = sorted(name for name, version_id in heads.items() if version_id == version.id)
        return self._branch if self._branch in names else next(iter(names), None)

    def _place(self, parent: Ref | None, branch: str | None) -> tuple[ContextVersion | None, str]:
        """The version that a commit follows, and the branch that it extends."""
        heads = self.branches()
        is_detached = self._branch is None and self._head is not None
        if parent == "":
            name = _name(branch or (_free_name(self._branch, heads) if heads else "main"))
            if name in heads:
                raise ConflictError(f"There is a branch {name!r} already; leave branch= out.")
            return None, name
        if parent is None and (branch is not None or not is_detached):
            name = _name(branch if branch is not None else self._branch or "main")
            base = self.get(heads[name]) if name in heads else self._head and self._read(self._head)
        else:
            base = self._read(self._present() if parent is None else parent)
            known = self._branch_at(base, heads) or _free_name(self._branch, heads)
            name = known if branch is None else _name(branch)
            if heads.get(name, base.id) != base.id:
                raise ConflictError(
                    f"Version {base.id} is not the newest one of branch {name!r}; leave branch= "
                    "out to begin a new branch there, or name one that does not exist."
                )
        return base, name

    def _read(self, ref: Ref) -> ContextVersion:
        """As `get`, but a missing version is a conflict."""
        if not isinstance(ref, ContextVersion):
            return self.get(ref)
        version = self.store.load(self.key, ref.id)
        if version is None:
            raise ConflictError(
                f"Thread {self.key} has no version {ref.id}: it was deleted by another writer, or "
                "is of another thread. Open the history anew to see what there is."
            )
        return version

    def _put(
        self, draft: Draft, base: ContextVersion | None, seen: ContextVersion | None, branch: str
    ) -> Drafted:
        """Store a version after `base`, in a transaction that is open."""
        version = ContextVersion(self._ids.next(), (), time_s=self._clock_ns() / 1e9)
        if base is None or seen is None:
            drafted = first_version(draft, version)
        else:
            following = next_version(
                draft,
                version,
                thread=self.key,
                base=base,
                seen=seen,
                is_recorded=lambda edit: _sign(edit) in self._signs(base),
            )
            if following is None:
                if branch not in self.branches():
                    self.store.put(self.key, base, branch)
                return Drafted(base)
            drafted = following
        new, scrubber = drafted.version, draft.scrubber
        self.store.put(self.key, new, branch)
        if drafted.forgets:
            threads = self.store.related(self.key)
            names = [*self.branches(), *(str(key) for key in threads)]
            if any(scrubber.text(name) != name for name in names):
                raise ContextError(
                    "The name of a thread or branch holds one of the secrets, and names cannot be "
                    "changed: delete that thread."
                )
            self.store.rewrite(
                self.key,
                lambda versions: forget(versions, new.id, drafted.forgotten, scrubber, threads),
            )
        return drafted

    def _done(self, drafted: Drafted, branch: str) -> ContextVersion:
        """What is left to do when the transaction is through."""
        version = drafted.version
        last, signs = self._recorded
        if drafted.forgets:
            self.store.erase()
            self._recorded = ("", set())
        elif version.parents and version.parents[0] == last:
            signs.update(_signs(version))
            self._recorded = (version.id, signs)
        self._head = self.store.load(self.key, version.id) or version
        self._branch = branch
        return self._head

    def _signs(self, version: ContextVersion) -> set[tuple[str, bool]]:
        """What tells the declared edits that led to a version."""
        if self._recorded[0] != version.id:
            line = self._line(version)
            self._recorded = (version.id, {sign for each in line for sign in _signs(each)})
        return self._recorded[1]


def _signs(version: ContextVersion) -> set[tuple[str, bool]]:
    return {_sign(edit) for edit in version.edits if edit.declared}


def _sign(edit: Edit) -> tuple[str, bool]:
    """What the same declaration has in common when it is made again."""
    return edit.idempotency_key, edit.forget


def _declared(edits: Iterable[Edit] | None) -> tuple[Edit, ...]:
    declared = (edits,) if isinstance(edits, Edit) else tuple(edits or ())
    if wrong := [edit for edit in declared if not isinstance(edit, Edit)]:
        raise ContextError(f"Declare edits with Edit.declare, not by {wrong[0]!r}.")
    return declared


def _name(name: str | None) -> str:
    """A branch's name, checked."""
    if not isinstance(name, str) or not name:
        raise ContextError(f"A branch needs a name, not {name!r}.")
    check_text(name, "The name of a branch")
    return name


def _free_name(like: str | None, taken: Mapping[str, str]) -> str:
    """A generated name for a new branch."""
    number = 2
    while f"{like or 'main'}-{number}" in taken:
        number += 1
    return f"{like or 'main'}-{number}"
