"""Blobs in a local folder, in S3, Google Cloud Storage or Azure, or in memory, by `obstore`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchkv_agents.checkpoint.stores.blobs import BlobInfo
from patchkv_agents.errors import CheckpointError

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class ObjectBlobs:
    """Blobs in an obstore store; use `open_objects` to make one.

    Args:
        store: any store of `obstore.store`. Its time limits and retries are the caller's choice.
        folder: the local folder of a `LocalStore`.
    """

    def __init__(self, store: ObjectStore, folder: Path | None = None) -> None:
        self._store = store
        self._folder = folder

    @property
    def part_bytes(self) -> int:
        """4 MiB for local files (measured: larger ones are slower), 16 MiB for servers."""
        return (4 if self._folder is not None else 16) << 20

    def put(self, name: str, data: bytes) -> None:
        """Write a blob (a local file under another name first, then renamed)."""
        import obstore

        with _explained(f"writing {len(data):,} bytes"):
            obstore.put(self._store, name, data, use_multipart=False)

    def get(self, name: str) -> memoryview | None:
        """The bytes of a blob, or None if there is none."""
        import obstore

        with _explained("reading"):
            try:
                return memoryview(obstore.get(self._store, name).bytes())
            except FileNotFoundError:
                return None

    def list_blobs(self, folder: str = "") -> list[BlobInfo]:
        """All blobs of a folder, or of the store."""
        import obstore

        with _explained("listing"):
            return [
                BlobInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())
                for chunk in obstore.list(self._store, folder or None, chunk_size=1000)
                for meta in chunk
            ]

    def delete(self, names: Sequence[str]) -> None:
        """Delete blobs; missing ones are ignored."""
        import obstore

        with _explained("deleting"):
            try:
                obstore.delete(self._store, list(names))
            except FileNotFoundError:  # some stores say so, and may have stopped there
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        obstore.delete(self._store, name)

    def touch(self, names: Sequence[str]) -> None:
        """Update the times of local files; object stores record the time of writing only."""
        if self._folder is None:
            return
        with _explained("touching"):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.utime(self._folder / name)

    def remove_partial(self, age_s: float) -> None:
        """Remove local files that were being written, which obstore names `<name>#<number>`."""
        if self._folder is None:
            return
        with _explained("deleting"):
            for path in self._folder.rglob("*#*"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime >= age_s:
                        path.unlink()

    def close(self) -> None:
        """Do nothing: obstore closes its connections with its store."""


def open_objects(location: str | Path, *, timeout_s: float = 5.0, **options: Any) -> ObjectBlobs:
    """Blobs under a folder or URL.

    Args:
        location: a local folder (made if absent), or a URL as obstore takes it: `file:///folder`,
            `s3://bucket/prefix`, `gs://...`, `az://...`, `memory:///`.
        timeout_s: limit for connecting, for each request with its answer, and for starting
            retries (two at most).
        options: for `obstore.store.from_url`, such as `region` or `endpoint`. Credentials come
            from the environment as with each provider's own tools.
    """
    import obstore.store

    from_url: Any = obstore.store.from_url  # its overloads list every option of every provider
    url = str(location) if "://" in str(location) else Path(location).absolute().as_uri()
    if url.startswith("file:"):
        options = {"mkdir": True, "automatic_cleanup": True, **options}
    elif not url.startswith("memory:"):
        limit = f"{int(timeout_s * 1000)}ms"
        client = {"timeout": limit, "connect_timeout": limit}
        retry = {"max_retries": 2, "retry_timeout": timedelta(seconds=timeout_s)}
        options = {
            **options,
            "client_options": {**client, **options.get("client_options", {})},
            "retry_config": {**retry, **options.get("retry_config", {})},
        }
    with _explained("opening"):
        store = from_url(url, **options)
    return ObjectBlobs(store, store.prefix if url.startswith("file:") else None)


@contextlib.contextmanager
def _explained(action: str) -> Iterator[None]:
    """Raise errors of obstore and of the file system as `CheckpointError`."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        reason = str(error).split("\n\nDebug source:")[0]
        raise CheckpointError(
            f"{action} failed in the checkpoint store: {reason}. Check that it is reachable, "
            "has space left and lets you write"
        ) from error
