"""Tables of versions and texts in an SQLite file."""

from __future__ import annotations

import json
import operator
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar, cast

from patchkv_agents.context.frozen import FrozenJson, to_json
from patchkv_agents.context.messages import Message
from patchkv_agents.context.sequences import equal_ends
from patchkv_agents.context.stores.base import Rewrite
from patchkv_agents.context.stores.codec import (
    decode_edit,
    decode_forgotten,
    decode_message,
    encode_edit,
    encode_forgotten,
    encode_message,
)
from patchkv_agents.context.stores.splices import LONGEST_CHAIN, spliced, splices
from patchkv_agents.context.versions import ContextVersion

T = TypeVar("T")

# What is kept in memory beside the file.
_CACHED_VERSIONS = 64
_CACHED_CHARACTERS = 16_000_000


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A version and the keys of its messages in the table `texts`."""

    keys: tuple[int, ...]
    version: ContextVersion


_NOTHING = _Loaded((), ContextVersion("", ()))


class SQLiteVersions:
    """Reads and writes versions, inside of transactions that the caller opens.

    A version is stored as splices of its parent, a text once per family (a thread and its forks).
    Keys are those of the tables.
    """

    def __init__(self, database: sqlite3.Connection) -> None:
        self._db = database
        self._versions: OrderedDict[int, _Loaded] = OrderedDict()
        self._texts: OrderedDict[int, tuple[int, object]] = OrderedDict()
        self._characters = 0

    def clear_cache(self) -> None:
        """Read everything from the file again."""
        self._versions.clear()
        self._texts.clear()
        self._characters = 0

    def find(self, family: int, version_id: str) -> int | None:
        """Key of a version."""
        row = self._db.execute(
            "SELECT key FROM versions WHERE family = ? AND id = ?", (family, version_id)
        ).fetchone()
        return row[0] if row else None

    def cached(self, key: int | None) -> ContextVersion | None:
        """The version of that key, if it is in memory."""
        loaded = None if key is None else self._versions.get(key)
        if loaded is None or key is None:
            return None
        self._versions.move_to_end(key)
        return loaded.version

    def load(self, key: int) -> ContextVersion:
        """The version of that key."""
        return self._load(key).version

    def insert(self, family: int, version: ContextVersion) -> int:
        """Store a new version; returns its key."""
        parent = self.find(family, version.parents[0]) if version.parents else None
        before = _NOTHING if parent is None else self._load(parent)
        base, depth = parent, 0
        if parent is not None:
            row = self._db.execute("SELECT depth FROM versions WHERE key = ?", (parent,)).fetchone()
            depth = row[0] + 1
        if depth > LONGEST_CHAIN:
            base, depth = None, 0
        # By identity: what did not change is the same object, and hashing all is most of the cost.
        messages = version.messages
        head, tail = equal_ends(before.version.messages, messages, operator.is_)
        inner = messages[head : len(messages) - tail]
        known = dict(zip(map(id, before.version.messages), before.keys, strict=True))
        keys = (
            *before.keys[:head],
            *(known.get(id(each)) or self._message_key(family, each) for each in inner),
            *before.keys[len(before.keys) - tail :],
        )
        columns = self._columns(family, version, splices(() if base is None else before.keys, keys))
        key = self._inserted(
            "INSERT INTO versions (splices, tools, template_args, record, digest, family, id, base,"
            " depth) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*columns, _digest(version.id, base, *columns), family, version.id, base, depth),
        )
        self._remember(key, _Loaded(keys, version))
        return key

    def rewrite(self, family: int, change: Rewrite) -> None:
        """Replace all versions of a family by other contents."""
        rows = self._db.execute(
            "SELECT key, base FROM versions WHERE family = ? ORDER BY key", (family,)
        ).fetchall()
        versions = change([self.load(key) for key, _ in rows])
        self.clear_cache()
        lists: dict[int | None, tuple[int, ...]] = {None: ()}
        known: dict[Message, int] = {}
        for (key, base), version in zip(rows, versions, strict=True):
            for message in version.messages:
                if message not in known:
                    known[message] = self._message_key(family, message)
            lists[key] = tuple(known[message] for message in version.messages)
            columns = self._columns(family, version, splices(lists[base], lists[key]))
            self._db.execute(
                "UPDATE versions SET splices = ?, tools = ?, template_args = ?, record = ?, "
                "digest = ? WHERE key = ?",
                (*columns, _digest(version.id, base, *columns), key),
            )
        self.sweep(family)

    def sweep(self, family: int) -> None:
        """Delete texts that no version refers to."""
        self.clear_cache()
        used: set[int] = set()
        for changes, *others in self._db.execute(
            "SELECT splices, tools, template_args FROM versions WHERE family = ?", (family,)
        ):
            used.update(others)
            used.update(key for _, _, keys in json.loads(changes) for key in keys)
        rows = self._db.execute("SELECT key FROM texts WHERE family = ?", (family,)).fetchall()
        self._db.executemany(
            "DELETE FROM texts WHERE key = ?", [r for r in rows if r[0] not in used]
        )

    def _columns(
        self,
        family: int,
        version: ContextVersion,
        changes: Sequence[object],
    ) -> tuple[str, int, int, str]:
        """The row's splices, tools, template_args and record, for a version told as changes."""
        tools = self._text_key(family, to_json([tool.text for tool in version.tools]))
        arguments = self._text_key(family, version.template_args.text)
        record = {
            "parents": version.parents,
            "edits": [encode_edit(edit) for edit in version.edits],
            "author": version.author,
            "checkpoint_id": version.checkpoint_id,
            "forgotten": version.forgotten and encode_forgotten(version.forgotten),
            "time_s": version.time_s,
        }
        return to_json(changes), tools, arguments, to_json(record)

    def _message_key(self, family: int, message: Message) -> int:
        return self._text_key(family, encode_message(message))

    def _text_key(self, family: int, body: str) -> int:
        """Key of a text, which is stored if it is new."""
        digest = _digest(body)
        row = self._db.execute(
            "SELECT key FROM texts WHERE family = ? AND digest = ?", (family, digest)
        ).fetchone()
        if row is not None:
            return int(row[0])
        return self._inserted(
            "INSERT INTO texts (family, digest, body) VALUES (?, ?, ?)", (family, digest, body)
        )

    def _inserted(self, statement: str, values: Sequence[object]) -> int:
        """Insert a row; returns its key."""
        key = self._db.execute(statement, values).lastrowid
        if key is None:
            raise RuntimeError("SQLite gives a key to each row that it inserts")
        return key

    def _load(self, key: int) -> _Loaded:
        try:
            return self._read(key)
        except (ValueError, TypeError, LookupError) as error:
            raise sqlite3.DatabaseError(f"version {key} cannot be decoded: {error}") from error

    def _read(self, key: int) -> _Loaded:
        chain: list[tuple[Any, ...]] = []
        at: int | None = key
        while at is not None and at not in self._versions:
            row = self._db.execute(
                "SELECT key, digest, id, base, splices, tools, template_args, record FROM versions "
                "WHERE key = ?",
                (at,),
            ).fetchone()
            chain.append(row)
            _check(row[1], *row[2:])
            at = row[3]
        keys = () if at is None else self._versions[at].keys
        for version_key, _, version_id, _, changes, *columns in reversed(chain):
            keys = spliced(keys, json.loads(changes))
            self._remember(version_key, _Loaded(keys, self._decoded(keys, version_id, *columns)))
        self._versions.move_to_end(key)
        return self._versions[key]

    def _decoded(
        self, keys: Sequence[int], version_id: str, tools: int, template_args: int, record: str
    ) -> ContextVersion:
        values = json.loads(record)
        forgotten = values["forgotten"] and decode_forgotten(values["forgotten"])
        if forgotten and counter(self._db, "unerased"):
            forgotten = replace(forgotten, status="pending")
        return ContextVersion(
            id=version_id,
            messages=tuple(self._text(key, decode_message) for key in keys),
            tools=self._text(tools, lambda body: tuple(map(FrozenJson, json.loads(body)))),
            template_args=self._text(template_args, FrozenJson),
            parents=tuple(values["parents"]),
            edits=tuple(map(decode_edit, values["edits"])),
            author=values["author"],
            checkpoint_id=values["checkpoint_id"],
            forgotten=forgotten,
            time_s=values["time_s"],
        )

    def _text(self, key: int, decode: Callable[[str], T]) -> T:
        """The decoded object of a text; the same object while it is in the cache."""
        if key in self._texts:
            self._texts.move_to_end(key)
            _, value = self._texts[key]
            return cast(T, value)
        query = "SELECT digest, body FROM texts WHERE key = ?"
        digest, body = self._db.execute(query, (key,)).fetchone()
        _check(digest, body)
        decoded = decode(body)
        self._texts[key] = len(body), decoded
        self._characters += len(body)
        while self._characters > _CACHED_CHARACTERS:
            _, (length, _) = self._texts.popitem(last=False)
            self._characters -= length
        return decoded

    def _remember(self, key: int, loaded: _Loaded) -> None:
        self._versions[key] = loaded
        if len(self._versions) > _CACHED_VERSIONS:
            self._versions.popitem(last=False)


def counter(database: sqlite3.Connection, name: str) -> int:
    """One of the file's counters."""
    row = database.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
    if row is None:
        raise sqlite3.DatabaseError(f"it has no counter {name!r}")
    return int(row[0])


def _digest(*values: str | int | None) -> bytes:
    """Checksum of a row's values: SQLite does not detect flipped bits."""
    whole = values[0] if len(values) == 1 else to_json(values)
    return blake2b(str(whole).encode(), digest_size=16).digest()


def _check(digest: bytes, *values: str | int | None) -> None:
    if _digest(*values) != digest:
        raise ValueError("its bytes have changed since it was written")
