"""Blob stores that tests look into and break."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from patchkv_agents.checkpoint.stores.blobs import BlobInfo
from patchkv_agents.errors import CheckpointError


class DictBlobs:
    """Blobs in a dictionary. `before(action, name)` runs first and may raise."""

    part_bytes = 4096

    def __init__(self, before: Callable[[str, str], None] = lambda action, name: None) -> None:
        self.data: dict[str, bytes] = {}
        self.modified_s: dict[str, float] = {}
        self.before = before
        self.lock = threading.Lock()

    def put(self, name: str, data: bytes) -> None:
        self.before("put", name)
        with self.lock:
            self.data[name] = bytes(data)
            self.modified_s[name] = time.time()

    def get(self, name: str) -> memoryview | None:
        self.before("get", name)
        with self.lock:
            return memoryview(self.data[name]) if name in self.data else None

    def list_blobs(self, folder: str = "") -> list[BlobInfo]:
        self.before("list", folder)
        with self.lock:
            return [
                BlobInfo(name, len(data), self.modified_s[name])
                for name, data in self.data.items()
                if name.startswith(folder)
            ]

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.before("delete", name)
            with self.lock:
                self.data.pop(name, None)

    def touch(self, names: Sequence[str]) -> None:
        with self.lock:
            self.modified_s.update({name: time.time() for name in names if name in self.data})

    def remove_partial(self, age_s: float) -> None:
        pass

    def close(self) -> None:
        pass

    def of_kind(self, kind: str) -> list[str]:
        """Names of the blobs of a kind: manifest, arrays or part."""
        return sorted(name for name in self.data if name.rsplit("/", 1)[-1].startswith(kind))


class Full:
    """Raises from the `allowed`-th write on, as a full disk does."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed

    def __call__(self, action: str, name: str) -> None:
        if action == "put":
            self.allowed -= 1
            if self.allowed < 0:
                raise CheckpointError("no space left on device")


class Killed(BaseException):
    """The process ended here."""


class KilledAt:
    """Lets `actions` actions that change something through, and nothing after them."""

    def __init__(self, actions: int) -> None:
        self.actions = actions

    def __call__(self, action: str, name: str) -> None:
        if action in ("put", "delete"):
            self.actions -= 1
        if self.actions < 0:
            raise Killed
