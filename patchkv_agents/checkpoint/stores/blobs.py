"""The interface of blob stores that can hold checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_PART_BYTES = 64 << 20
"""Size of the largest blob."""


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A stored blob.

    Attributes:
        name: its folders and name, separated by `/`.
        size: in bytes.
        modified_s: when it was last written or touched, in seconds since the epoch.
    """

    name: str
    size: int
    modified_s: float


class BlobStore(Protocol):
    """Named, immutable bytes in two levels of folders (`tenant/thread/name`). Thread-safe.

    Every failure is a `CheckpointError`, raised within bounded time.
    """

    @property
    def part_bytes(self) -> int:
        """Size of the parts that the store transfers fastest, at most `MAX_PART_BYTES`."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a blob atomically, replacing one of the same name."""
        ...

    def get(self, name: str) -> memoryview | None:
        """The bytes of a blob, or None if there is none."""
        ...

    def list_blobs(self, folder: str = "") -> list[BlobInfo]:
        """All blobs of a folder (`tenant/thread`), or of the store."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete blobs; missing ones are ignored."""
        ...

    def touch(self, names: Sequence[str]) -> None:
        """Record that blobs are in use, where the store supports it; missing ones are ignored."""
        ...

    def remove_partial(self, age_s: float) -> None:
        """Delete partial data of writers that died, where `list_blobs` does not show it."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...
