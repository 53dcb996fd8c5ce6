"""What a place for named bytes must be able to do, so that checkpoints can be kept there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_PART_BYTES = 64 << 20
"""Largest blob that is ever written."""


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
    """Named, immutable-once-written bytes in two levels of folders (`tenant/thread/name`).

    Several threads use one at once. Everything that goes wrong is a `CheckpointError`, after
    bounded time.
    """

    @property
    def part_bytes(self) -> int:
        """Size of blob that the store moves fastest, at most `MAX_PART_BYTES`."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a blob, all of it or nothing, in place of one of this name."""
        ...

    def get(self, name: str) -> memoryview | None:
        """The bytes of a blob, or None if there is none."""
        ...

    def list_blobs(self, folder: str = "") -> list[BlobInfo]:
        """All blobs of a folder (`tenant/thread`), or of the store."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Remove blobs; absent ones are no error."""
        ...

    def touch(self, names: Sequence[str]) -> None:
        """Note that blobs are in use, where the store keeps the time; absent ones are no error."""
        ...

    def remove_partial(self, age_s: float) -> None:
        """Remove what writers that died left behind, where `list_blobs` does not show it."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...
