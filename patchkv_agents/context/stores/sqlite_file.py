"""Opens the SQLite files of `SQLiteHistoryStore`; refuses other files."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from patchkv_agents.errors import HistoryStoreError

APPLICATION_ID = 0x504B5648  # "PKVH"
SCHEMA_VERSION = 1

_MAGIC = b"SQLite format 3\0"
_SCHEMA = f"""
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO counters VALUES ('rewrites', 0), ('unerased', 0);
CREATE TABLE threads (
    key INTEGER PRIMARY KEY,
    thread TEXT NOT NULL,
    namespace TEXT NOT NULL,
    family INTEGER NOT NULL,  -- a thread and its forks, which share versions and texts
    UNIQUE (thread, namespace)
);
CREATE TABLE texts (
    key INTEGER PRIMARY KEY,
    family INTEGER NOT NULL,
    digest BLOB NOT NULL,
    body TEXT NOT NULL  -- a message, a list of tool schemas or template arguments
);
CREATE INDEX texts_by_digest ON texts (family, digest);
CREATE TABLE versions (
    key INTEGER PRIMARY KEY,
    family INTEGER NOT NULL,
    id TEXT NOT NULL,
    base INTEGER,  -- the version whose list of messages this one's changes; NULL: the empty list
    depth INTEGER NOT NULL,  -- how many bases there are
    splices TEXT NOT NULL,  -- [[start, stop, [keys of texts]], ...]
    tools INTEGER NOT NULL,
    template_args INTEGER NOT NULL,
    record TEXT NOT NULL,  -- parents, edits and the rest
    digest BLOB NOT NULL,  -- of id, base, splices, tools, template_args and record
    UNIQUE (family, id)
);
CREATE TABLE members (
    thread INTEGER NOT NULL, version INTEGER NOT NULL, PRIMARY KEY (thread, version)
) WITHOUT ROWID;
CREATE TABLE branches (
    thread INTEGER NOT NULL,
    name TEXT NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (thread, name)
) WITHOUT ROWID;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
""".split(";\n")


def open_file(
    path: Path, mode: Literal["rw", "r"], timeout_s: float
) -> tuple[sqlite3.Connection, bool]:
    """Open a history file, making it if it is to be written and does not exist.

    Returns:
        The connection, in autocommit mode, and whether it can only read.

    Raises:
        HistoryStoreError: it is another kind of file, of another schema, or cannot be opened. It
            was not changed.
    """
    if not path.parent.is_dir():
        raise HistoryStoreError(f"There is no folder {path.parent} for {path.name}; make it first.")
    if path.is_dir():
        raise HistoryStoreError(f"{path} is a folder; name a file in it.")
    exists = path.exists()
    if mode == "r" and not exists:
        raise HistoryStoreError(f"There is no file {path}. Check the path.")
    with translated(path):
        is_new = not exists or _check_header(path)
        writable = os.access(path if exists else path.parent, os.W_OK)
        if mode == "r" or not (writable and os.access(path.parent, os.W_OK)):
            if is_new:
                raise HistoryStoreError(f"{path} holds no history and cannot be written.")
            return _open_reading(path, timeout_s), True
        connection = _connect(path, "mode=rwc", timeout_s)
        try:
            _create(connection)
            _prepare_writing(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection, False


def file_id(path: Path) -> tuple[int, int] | None:
    """Identity of the file at a path (device and inode); None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as `HistoryStoreError`."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter from damaged schemas
        raise HistoryStoreError(f"{path}: {_explained(error)}") from error
    except OSError as error:
        raise HistoryStoreError(f"{path} cannot be read: {error.strerror or error}.") from error


def _explained(error: sqlite3.Error | UnicodeDecodeError) -> str:
    text = str(error)
    if "locked" in text or "busy" in text:
        return "another process has been writing to it for too long; try again."
    if "full" in text:
        return "the disk is full. Nothing was changed; make room and try again."
    if "readonly" in text:
        return "it was opened for reading only."
    if "closed" in text:
        return "the store was closed; open it again."
    damage = ("malformed", "disk I/O", "no such table", "no such column", "Could not decode")
    plain = (sqlite3.DatabaseError, UnicodeDecodeError)
    if type(error) in plain or any(sign in text for sign in damage):
        return (
            f"the file is damaged ({text}). It was not changed: bring back a copy of it, or save "
            "what can be read with the sqlite3 program's .recover."
        )
    return f"{text}."


def _check_header(path: Path) -> bool:
    """Whether the file is empty; raises if it is not one of ours.

    Read without SQLite, which would change some files by opening them. What is compared is written
    before the file's first use with a log, so it is in the file itself.
    """
    with path.open("rb") as file:
        header = file.read(100)
    if not header:
        return True
    if not header.startswith(_MAGIC) or len(header) < 100:
        raise HistoryStoreError(
            f"{path} is not a history: it is no SQLite file. Choose another path; it was not "
            "changed."
        )
    application_id, schema = (int.from_bytes(header[at : at + 4], "big") for at in (68, 60))
    if application_id != APPLICATION_ID:
        raise HistoryStoreError(
            f"{path} is another program's SQLite file. Choose another path; it was not changed."
        )
    if schema != SCHEMA_VERSION:
        raise HistoryStoreError(
            f"{path} was written by {'a newer' if schema > SCHEMA_VERSION else 'an older'} release "
            f"of patchkv-agents (schema {schema}, this one has {SCHEMA_VERSION}); use that release."
            " It was not changed."
        )
    return False


def _connect(path: Path, options: str, timeout_s: float) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?{options}",
        uri=True,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
    )


def _create(connection: sqlite3.Connection) -> None:
    """Make the tables, before the log is used, unless they are there.

    Asked of SQLite and not of the header: a process that was killed here has left a file that
    SQLite takes back to empty.
    """
    count = "SELECT count(*) FROM sqlite_master"
    if connection.execute(count).fetchone() != (0,):
        return
    connection.execute("BEGIN IMMEDIATE")
    if connection.execute(count).fetchone() == (0,):  # no other process was quicker
        for statement in _SCHEMA:
            connection.execute(statement)
    connection.execute("COMMIT")


def _prepare_writing(connection: sqlite3.Connection, path: Path) -> None:
    (journal,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if journal != "wal":
        raise HistoryStoreError(
            f"{path}: its folder cannot hold a write-ahead log (a network drive?); choose another."
        )
    # Killed processes lose nothing; a power failure may take the last commits, never the file.
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA secure_delete = ON")
    # Text that is being removed goes to no other files.
    connection.execute("PRAGMA temp_store = MEMORY")


def _open_reading(path: Path, timeout_s: float) -> sqlite3.Connection:
    """Open without changing anything, in a folder that cannot be written too."""
    connection = _connect(path, "mode=ro", timeout_s)
    try:
        connection.execute("SELECT value FROM counters").fetchall()
        return connection
    except sqlite3.OperationalError as error:
        connection.close()
        log = path.with_name(path.name + "-wal")
        if log.exists() and log.stat().st_size:
            raise HistoryStoreError(
                f"{path} cannot be read where it is ({error}): its newest versions are in "
                f"{log.name}. Copy both files to a folder that can be written, and open it there."
            ) from error
    return _connect(path, "mode=ro&immutable=1", timeout_s)
