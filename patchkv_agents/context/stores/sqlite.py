"""A store in an SQLite file, for several processes at once."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from threading import RLock
from typing import Literal

from patchkv_agents.context.stores.base import Rewrite
from patchkv_agents.context.stores.sqlite_file import file_id, open_file, translated
from patchkv_agents.context.stores.sqlite_versions import SQLiteVersions, counter
from patchkv_agents.context.versions import ContextVersion, ThreadKey
from patchkv_agents.errors import HistoryStoreError

_ERASE_TIMEOUT_MS = 250


class SQLiteHistoryStore:
    """A history store in one SQLite file. See `HistoryStore`.

    Several processes may read and write it at once. An acknowledged commit survives a kill
    of the process (a power failure may lose the last ones). Forgotten text is overwritten in the
    file and in its log; copies of earlier contents in file systems, snapshots and disks are out of
    reach.

    Args:
        path: the file; made if it does not exist.
        mode: `"r"` opens an existing file and changes nothing. Files and folders that cannot be
            written are opened so in any case.
        timeout_s: how long to wait for other processes' transactions.

    Raises:
        HistoryStoreError: the file is damaged, of another kind or schema, or cannot be opened. It
            was not changed.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        mode: Literal["rw", "r"] = "rw",
        timeout_s: float = 10.0,
    ) -> None:
        self.path = Path(path).absolute()  # a program may change its folder
        self._timeout_ms = int(timeout_s * 1e3)
        self._lock = RLock()
        self._db, self.read_only = open_file(self.path, mode, timeout_s)
        self._file = file_id(self.path)
        self._versions = SQLiteVersions(self._db)
        self._seen = (-1, -1)  # data_version, and the counter of rewrites
        # Keys of versions, and the branches, as long as nobody changes the file.
        self._keys: dict[tuple[ThreadKey, str], int] = {}
        self._heads: dict[ThreadKey, dict[str, str]] = {}
        if not self.read_only:
            self.erase()

    def __enter__(self) -> SQLiteHistoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def threads(self) -> tuple[ThreadKey, ...]:
        """All threads, sorted."""
        with self._reading():
            rows = self._db.execute("SELECT thread, namespace FROM threads")
            return tuple(sorted(ThreadKey(*row) for row in rows))

    def related(self, thread: ThreadKey) -> tuple[ThreadKey, ...]:
        """The thread and those that share versions with it."""
        with self._reading():
            rows = self._db.execute(
                "SELECT thread, namespace FROM threads WHERE family = ?", (self._ids(thread)[1],)
            )
            return tuple(sorted(ThreadKey(*row) for row in rows))

    def branches(self, thread: ThreadKey) -> dict[str, str]:
        """Newest version of each branch."""
        with self._lock, translated(self.path):
            self._drop_stale()
            if thread in self._heads:
                return dict(self._heads[thread])
        with self._reading():
            rows = self._db.execute(
                "SELECT name, id FROM branches JOIN versions ON version = versions.key "
                "WHERE thread = ? ORDER BY name",
                self._ids(thread)[:1],
            )
            heads = self._heads[thread] = dict(rows.fetchall())
            return dict(heads)

    def version_ids(self, thread: ThreadKey) -> tuple[str, ...]:
        """Ids of the thread's versions."""
        with self._reading():
            rows = self._db.execute(
                "SELECT id FROM members JOIN versions ON version = versions.key "
                "WHERE thread = ? ORDER BY version",
                self._ids(thread)[:1],
            )
            return tuple(version_id for (version_id,) in rows)

    def load(self, thread: ThreadKey, version_id: str) -> ContextVersion | None:
        """A version of the thread."""
        with self._lock, translated(self.path):
            self._drop_stale()
            known = self._versions.cached(self._keys.get((thread, version_id)))
            if known is not None:
                return known
        with self._reading():
            key, family = self._ids(thread)
            version = self._versions.find(family, version_id)
            is_member = self._db.execute(
                "SELECT 1 FROM members WHERE thread = ? AND version = ?", (key, version)
            ).fetchone()
            if not version or not is_member:
                return None
            self._keys[thread, version_id] = version
            return self._versions.load(version)

    @contextmanager
    def writing(self, thread: ThreadKey) -> Iterator[None]:
        """One transaction."""
        with self._lock, translated(self.path):
            self._check_file()
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._drop_stale()
                yield
                self._db.execute("COMMIT")
            except BaseException:
                self._clear_cache()
                self._roll_back()
                raise

    def put(self, thread: ThreadKey, version: ContextVersion, branch: str) -> None:
        """Make a version the newest of a branch."""
        self._heads.clear()
        thread_key, family = self._ids(thread)
        if not family:
            thread_key = family = self._new_thread(thread)
        key = self._versions.find(family, version.id) or self._versions.insert(family, version)
        self._db.execute("INSERT OR IGNORE INTO members VALUES (?, ?)", (thread_key, key))
        self._db.execute(
            "INSERT OR REPLACE INTO branches VALUES (?, ?, ?)", (thread_key, branch, key)
        )

    def fork(self, source: ThreadKey, target: ThreadKey) -> None:
        """Make a new thread with the versions of another."""
        self._heads.clear()
        old, family = self._ids(source)
        if not family:
            raise HistoryStoreError(f"There is no thread {source} to fork; commit to it first.")
        if self._ids(target)[1]:
            raise HistoryStoreError(f"There is a thread {target} already; choose another name.")
        new = self._new_thread(target, family)
        for table, columns in (("members", "version"), ("branches", "name, version")):
            self._db.execute(
                f"INSERT INTO {table} SELECT ?, {columns} FROM {table} WHERE thread = ?", (new, old)
            )

    def rewrite(self, thread: ThreadKey, change: Rewrite) -> None:
        """Replace versions by other contents."""
        _, family = self._ids(thread)
        self._versions.rewrite(family, change)
        self._count_rewrite()

    def delete(self, thread: ThreadKey) -> None:
        """Remove a thread."""
        key, family = self._ids(thread)
        if not family:
            return
        for table, column in (("members", "thread"), ("branches", "thread"), ("threads", "key")):
            self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (key,))
        self._db.execute(
            "DELETE FROM versions WHERE family = ? AND key NOT IN (SELECT version FROM members)",
            (family,),
        )
        self._versions.sweep(family)
        self._count_rewrite()

    def erase(self) -> bool:
        """Overwrite what was removed: rebuild the file, and empty the log."""
        with self._lock, translated(self.path):
            if not counter(self._db, "unerased"):
                return True
            self._check_file()
            rewrites = counter(self._db, "rewrites")
            self._db.execute(f"PRAGMA busy_timeout = {_ERASE_TIMEOUT_MS}")
            try:
                # Deleted content is zeroed already, but pages that were split keep remnants.
                self._db.execute("VACUUM")
                if not self._empty_log():
                    return False
                done = self._db.execute(
                    "UPDATE counters SET value = 0 WHERE name = 'unerased' AND "
                    "(SELECT value FROM counters WHERE name = 'rewrites') = ?",
                    (rewrites,),
                )
                return done.rowcount == 1  # unless another process has removed something since
            except sqlite3.OperationalError:  # locked by another process, or the disk is full
                return False
            finally:
                self._versions.clear_cache()
                self._db.execute(f"PRAGMA busy_timeout = {self._timeout_ms}")

    def close(self) -> None:
        """Release the file."""
        with self._lock:
            self._versions.clear_cache()
            self._db.close()

    def _check_file(self) -> None:
        """Raise if the file was deleted or replaced: writes would be lost, or go to another log."""
        if file_id(self.path) != self._file:
            raise HistoryStoreError(
                f"{self.path} was deleted or replaced while it was open. Nothing was written; open "
                "it again, and commit again."
            )

    def _empty_log(self) -> bool:
        (busy, _, _) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A read transaction: one consistent state of the file for several queries."""
        with self._lock, translated(self.path):
            if self._db.in_transaction:
                yield
                return
            self._db.execute("BEGIN")
            try:
                self._drop_stale()
                yield
            finally:
                self._roll_back()

    def _roll_back(self) -> None:
        if self._db.in_transaction:  # some errors have ended it
            self._db.execute("ROLLBACK")

    def _drop_stale(self) -> None:
        """Clear the cache if another process has rewritten versions."""
        (changes,) = self._db.execute("PRAGMA data_version").fetchone()
        if changes != self._seen[0]:
            self._keys.clear()
            self._heads.clear()
            seen = (changes, counter(self._db, "rewrites"))
            if seen[1] != self._seen[1]:
                self._versions.clear_cache()
            self._seen = seen

    def _clear_cache(self) -> None:
        self._versions.clear_cache()
        self._keys.clear()
        self._heads.clear()

    def _count_rewrite(self) -> None:
        self._clear_cache()
        self._db.execute("UPDATE counters SET value = value + 1 WHERE name = 'rewrites'")
        self._db.execute("UPDATE counters SET value = 1 WHERE name = 'unerased'")

    def _ids(self, thread: ThreadKey) -> tuple[int, int]:
        """The thread's key and family; zeros if there is no such thread."""
        row = self._db.execute(
            "SELECT key, family FROM threads WHERE thread = ? AND namespace = ?",
            (thread.thread, thread.namespace),
        ).fetchone()
        return (row[0], row[1]) if row else (0, 0)

    def _new_thread(self, thread: ThreadKey, family: int | None = None) -> int:
        """Make a thread, in a family of its own or in a given one. Returns its key."""
        (key,) = self._db.execute("SELECT coalesce(max(key), 0) + 1 FROM threads").fetchone()
        self._db.execute(
            "INSERT INTO threads VALUES (?, ?, ?, ?)",
            (key, thread.thread, thread.namespace, family or key),
        )
        return int(key)
