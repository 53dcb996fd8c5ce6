"""A log from which a run that was interrupted goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from patchkv_agents.errors import InputError


class JsonLog:
    """A JSONL file to which a run appends, and from which the next one goes on.

    Attributes:
        lines: what it holds, without its head.

    Args:
        path: made if it does not exist. A last line that was not written to its end is dropped.
        head: what the lines belong to; the first line of the file.

    Raises:
        InputError: the file has another head, or a line is not JSON.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(path, len(whole))
        try:
            found = [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise InputError(f"{path} is damaged: delete it and run again") from error
        if not found:
            self.append([head])
        elif found[0] != head:
            differing = [key for key in head if dict(found[0]).get(key) != head[key]]
            raise InputError(
                f"{path} is of another run (it differs in {', '.join(differing) or 'its form'}): "
                "delete it, or choose another --out"
            )
        self.lines: list[dict[str, Any]] = found[1:]

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write lines; they are on disk then."""
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        with self._path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
