"""A log from which a run that was interrupted goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from patchkv_agents.errors import InputError
from patchkv_agents.files import append_json_lines, drop_torn_line, json_line, read_lines

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
            lines, torn = read_lines(path)
        except OSError as error:
            raise InputError(
                f"the progress of this run cannot be saved in {path} ({error.strerror or error}): "
                "choose another --out"
            ) from error
        try:
            records = [json.loads(line) for line in lines]
        except ValueError as error:
            raise self._damaged() from error
        if not all(isinstance(record, dict) for record in records):
            raise self._damaged()
        first = records[0] if records else {}
        if records and first != head or not records and not json_line(head).startswith(torn):
            differing = [key for key in head if first.get(key) != head[key]]
            raise InputError(
                f"{path} is of another run (it differs in {', '.join(differing) or 'its form'}): "
                "delete it, or choose another --out"
            )
        drop_torn_line(path)
        if not records:
            self.append([head])
        self._records: list[dict[str, Any]] = records[1:]

    def read(self, entry: Callable[[dict[str, Any]], Entry]) -> list[Entry]:
        """What `entry` makes of each line that was there at first, without the head.

        Raises:
            InputError: of one it can make nothing.
        """
        try:
            return [entry(line) for line in self._records]
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged() from error

    def _damaged(self) -> InputError:
        return InputError(f"{self._path} is damaged: delete it and run again")

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write lines; they are on disk then."""
        append_json_lines(self._path, lines)


def template_digest(engine: Engine) -> str:
    """Names the chat template, for the head of a log of pairs: they are known by their messages."""
    template = json.dumps(engine.tokenizer.chat_template)
    return hashlib.blake2b(template.encode(), digest_size=16).hexdigest()
