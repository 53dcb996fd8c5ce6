"""A log from which a run that was interrupted goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from patchkv_agents.errors import InputError

if TYPE_CHECKING:
    from patchkv_agents.engine import Engine

Entry = TypeVar("Entry")


class JsonLog:
    """A JSONL file to which a run appends, and from which the next one goes on.

    Args:
        path: made if it does not exist. A last line that was not written to its end is dropped.
        head: what the lines belong to; the first line of the file.

    Raises:
        InputError: the file has another head, a line is no JSON object, or it cannot be written.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise InputError(
                f"what was done cannot be kept in {path} ({error.strerror or error}): choose "
                "another --out"
            ) from error
        whole = content[: content.rfind(b"\n") + 1]
        try:
            found = [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise self._damaged() from error
        if not all(isinstance(line, dict) for line in found):
            raise self._damaged()
        first = found[0] if found else {}
        if found and first != head or not found and not _line(head).startswith(content):
            differing = [key for key in head if first.get(key) != head[key]]
            raise InputError(
                f"{path} is of another run (it differs in {', '.join(differing) or 'its form'}): "
                "delete it, or choose another --out"
            )
        if whole != content:
            os.truncate(path, len(whole))
        if not found:
            self.append([head])
        self._lines: list[dict[str, Any]] = found[1:]

    def read(self, entry: Callable[[dict[str, Any]], Entry]) -> list[Entry]:
        """What `entry` makes of each line that was there at first, without the head.

        Raises:
            InputError: of one it can make nothing.
        """
        try:
            return [entry(line) for line in self._lines]
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged() from error

    def _damaged(self) -> InputError:
        return InputError(f"{self._path} is damaged: delete it and run again")

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write lines; they are on disk then."""
        with self._path.open("ab") as file:
            file.write(b"".join(map(_line, lines)))
            file.flush()
            os.fsync(file.fileno())


def template_digest(engine: Engine) -> str:
    """Names the chat template, for the head of a log of pairs: they are known by their messages."""
    template = json.dumps(engine.tokenizer.chat_template)
    return hashlib.blake2b(template.encode(), digest_size=16).hexdigest()


def _line(line: Mapping[str, Any]) -> bytes:
    return (json.dumps(line, allow_nan=False) + "\n").encode()
