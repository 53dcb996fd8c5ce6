"""JSON values that cannot change, and ids that sort by time."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import Any

from patchkv_agents.errors import ContextError

MAX_DEPTH = 100
"""Deepest nesting of a value. Templates and the JSON library walk values recursively."""

# Made once: json.dumps makes one for each call.
to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class FrozenJson:
    """A JSON value kept as its text: immutable, hashable, and equal only if key order is equal too.

    Key order counts because chat templates print objects in their order.
    """

    text: str

    @classmethod
    def of(cls, value: Any, where: str) -> FrozenJson:
        """Freeze a copy of `value`, which is not changed.

        Args:
            value: anything made of dict (string keys), list, tuple, str, int, float, bool, None.
            where: the place of the value, for error messages, e.g. ``message 3, field 'content'``.

        Raises:
            ContextError: the value, or a part of it, is not JSON.
        """
        try:
            check_json(value, where)
            return cls(to_json(value))
        except RecursionError:
            raise ContextError(f"{where}: nested too deeply; flatten the value.") from None
        except ValueError as error:  # an integer of more digits than Python converts
            raise ContextError(f"{where}: {error}; pass the number as a string.") from None

    def load(self) -> Any:
        """A fresh copy of the value; changing it changes nothing here."""
        return json.loads(self.text)

    @property
    def canonical(self) -> str:
        """The value as text in which key order does not count."""
        return json.dumps(self.load(), sort_keys=True)

    @property
    def content_hash(self) -> str:
        """Hash of the text, so that key order counts."""
        return blake2b(self.text.encode(), digest_size=16).hexdigest()


def check_json(value: Any, where: str, depth: int = 0) -> None:
    """Raise ContextError, naming the place, unless `value` is JSON with finite numbers.

    Raises RecursionError where it is nested deeper than `MAX_DEPTH`.
    """
    if depth > MAX_DEPTH:
        raise RecursionError
    if value is None or isinstance(value, bool | int):
        return
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ContextError(
                f"{where}: {value} is not a JSON number; use null or a string instead."
            )
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ContextError(f"{where}: key {key!r} must be a string.")
            check_text(key, where)
            check_json(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(item, f"{where}[{index}]", depth + 1)
    else:
        raise ContextError(
            f"{where}: {type(value).__name__} is not JSON; convert it to text, numbers, lists "
            "and objects first."
        )


def check_text(text: str, where: str) -> None:
    """Raise ContextError if `text` is none, or has a lone surrogate, which nothing can encode."""
    if not isinstance(text, str):
        raise ContextError(f"{where}: must be text, not {text!r}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ContextError(
            f"{where}: lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; "
            "decode the text as UTF-8 (for instance with errors='replace') before passing it."
        ) from None


class IdSource:
    """Makes ids which are unique and sort in the order in which they were made.

    An id is `milliseconds-sequence-random` in hexadecimal. It says nothing of the content it
    names. Safe to share between threads.

    Args:
        clock_ns: nanoseconds since the epoch; a clock that stands still or goes back is fine.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = Lock()
        self._last = (0, 0)

    def next(self) -> str:
        """The next id, greater than every earlier one of this source."""
        with self._lock:
            last_ms, sequence = self._last
            ms = self._clock_ns() // 1_000_000
            if ms > last_ms:
                self._last = (ms, 0)
            elif sequence < 0xFFFF:
                self._last = (last_ms, sequence + 1)
            else:
                self._last = (last_ms + 1, 0)
            ms, sequence = self._last
        return f"{ms:012x}-{sequence:04x}-{secrets.token_hex(6)}"
