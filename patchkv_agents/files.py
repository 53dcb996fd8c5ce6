"""Files that survive a crash: atomic replacement, append-only JSON lines; the cache folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from patchkv_agents.errors import PatchKVError


def cache_folder() -> Path:
    """The user's cache folder: `PATCHKV_CACHE`, else the platform's place for caches.

    Raises:
        PatchKVError: neither is known.
    """
    from platformdirs import user_cache_path

    try:
        if chosen := os.environ.get("PATCHKV_CACHE"):
            return Path(chosen).expanduser().absolute()
        return user_cache_path("patchkv", appauthor=False)
    except RuntimeError as error:
        raise PatchKVError(
            f"there is no folder for the cache ({error}): set PATCHKV_CACHE to an absolute path"
        ) from error


def write_atomic(path: Path, text: str) -> None:
    """Replace a file's content by `text` in UTF-8; a reader sees the old content or the new.

    The file keeps its mode; a new file gets the mode that the process's umask allows. The content
    is on disk when the call returns.

    Raises:
        OSError: the file cannot be written; it is unchanged then.
    """
    beside = path.with_name(f".{path.name}.{uuid4().hex}.part")
    try:
        with beside.open("x", encoding="utf-8") as file:
            if path.exists():
                beside.chmod(path.stat().st_mode & 0o777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def append_json_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to a file, one JSON object a line; they are on disk when the call returns.

    A crash leaves whole lines and at most one torn line at the end; see `drop_torn_line`.

    Raises:
        OSError: the file cannot be written.
        ValueError: a record holds what JSON cannot express, such as NaN; nothing is written then.
    """
    lines = b"".join(map(json_line, records))
    if lines:
        with path.open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())


def json_line(record: Mapping[str, Any]) -> bytes:
    """A record as `append_json_lines` writes it."""
    return (json.dumps(record, allow_nan=False) + "\n").encode()


def read_lines(path: Path) -> tuple[list[bytes], bytes]:
    """The whole lines of a file without their ends, and a torn last line; nothing without a file.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], b""
    return lines, torn


def drop_torn_line(path: Path) -> None:
    """Cut off a last line that was not written to its end.

    Raises:
        OSError: the file cannot be read or changed.
    """
    lines, torn = read_lines(path)
    if torn:
        os.truncate(path, sum(len(line) + 1 for line in lines))


def sync(path: Path) -> None:
    """Flush a file or, where the system can, a folder to the disk."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
