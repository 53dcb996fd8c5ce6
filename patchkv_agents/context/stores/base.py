"""The interface of history stores. `ContextHistory` has the rules; a store only persists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from patchkv_agents.context.versions import ContextVersion, ThreadKey

Rewrite = Callable[[Sequence[ContextVersion]], Sequence[ContextVersion]]


class HistoryStore(Protocol):
    """A store of the versions and branches of threads. Thread-safe.

    A thread exists from its first `put` on. Versions are shared between a thread and its forks.
    `patchkv_agents.context.stores.conformance` tests an implementation.

    Methods that read raise `HistoryStoreError` where the store cannot be read; those that write
    also where it cannot be written, in which case nothing of the transaction is kept.
    """

    def threads(self) -> tuple[ThreadKey, ...]:
        """All threads, sorted."""

    def related(self, thread: ThreadKey) -> tuple[ThreadKey, ...]:
        """The thread and those that share versions with it through forks, sorted.

        Empty if there is no such thread.
        """

    def branches(self, thread: ThreadKey) -> dict[str, str]:
        """Id of the newest version of each branch, by the branch's name.

        Empty if there is no such thread. Inside `writing`, no other writer can change it.
        """

    def version_ids(self, thread: ThreadKey) -> tuple[str, ...]:
        """Ids of the thread's versions in the order in which they were put."""

    def load(self, thread: ThreadKey, version_id: str) -> ContextVersion | None:
        """A version of the thread, as it is now; None if the thread has none of that id."""

    def writing(self, thread: ThreadKey) -> AbstractContextManager[None]:
        """A transaction on the thread: exclusive among writers, committed as a whole or not at all.

        The writes are durable when the block ends without an exception. Blocks may not be nested.
        `put`, `fork`, `rewrite` and `delete` are called inside of one.
        """

    def put(self, thread: ThreadKey, version: ContextVersion, branch: str) -> None:
        """Make a version the newest of a branch; store it first if the thread does not have it.

        Its first parent, if it has one, is a version of the thread.
        """

    def fork(self, source: ThreadKey, target: ThreadKey) -> None:
        """Make a new thread with the versions and branches that `source` has now."""

    def rewrite(self, thread: ThreadKey, change: Rewrite) -> None:
        """Replace the versions of a thread and of all related ones by other contents.

        `change` is given all of them, parents before children, and returns as many with the same
        ids, parents and numbers of messages, in the same order. What is in none of them any more
        is removed for good: call `erase` after the transaction.
        """

    def delete(self, thread: ThreadKey) -> None:
        """Remove a thread. Versions that other threads share stay; the others go as by `rewrite`.

        A thread that does not exist is ignored.
        """

    def erase(self) -> bool:
        """Erase from the files what `rewrite` and `delete` removed, outside of a transaction.

        Returns:
            Whether nothing of it is left. If not, call again later; opening the store does so too.
        """

    def close(self) -> None:
        """Release the files. The store cannot be used any more; closing again does nothing."""
