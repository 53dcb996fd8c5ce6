"""Opens a checkpoint store by its address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patchkv_agents.checkpoint.serialization import checksum
from patchkv_agents.checkpoint.stores.base import CheckpointStore
from patchkv_agents.checkpoint.stores.blob_store import BlobCheckpointStore
from patchkv_agents.checkpoint.stores.blobs import BlobStore
from patchkv_agents.checkpoint.stores.memory import MemoryStore
from patchkv_agents.checkpoint.stores.objects import open_objects
from patchkv_agents.checkpoint.stores.redis import open_redis
from patchkv_agents.errors import InputError


def open_store(
    location: str | Path,
    *,
    budget_bytes: int | None = None,
    expire_s: int = 7 * 24 * 3600,
    timeout_s: float = 5.0,
    **options: Any,
) -> CheckpointStore:
    """Open a checkpoint store.

    Args:
        location: `memory:` for this process's memory; a local folder or `file:///folder`;
            `redis://host:port/0`, `rediss://...` or `unix://...` (Redis or Valkey);
            `s3://bucket/prefix`, `gs://...`, `az://...`, which are configured as their
            providers' own tools are, by environment variables.
        budget_bytes: beyond it the least recently used checkpoints are evicted; for memory and
            local folders.
        expire_s: checkpoints that were not used for this long are deleted: by Redis itself, in
            other stores by `sweep`, which also runs when a local folder is opened. Not for memory.
        timeout_s: limit for each request to a server.
        options: further arguments of `MemoryStore` or `BlobCheckpointStore`.

    Raises:
        InputError: a package is missing.
        CheckpointError: the folder or address cannot be used. Servers are asked at first use.
    """
    text = str(location)
    if text.rstrip("/") == "memory:":
        return MemoryStore(budget_bytes, **options)
    blobs: BlobStore
    try:
        checksum(b"")
        if text.startswith(("redis://", "rediss://", "unix://")):
            blobs = open_redis(text, timeout_s=timeout_s, expire_s=expire_s)
        else:
            blobs = open_objects(location, timeout_s=timeout_s)
    except ImportError as error:
        raise InputError(
            f"{text} needs a package that is not installed ({error.name}): "
            'run `pip install "patchkv-agents[remote]"`'
        ) from error
    store = BlobCheckpointStore(blobs, budget_bytes=budget_bytes, expire_s=expire_s, **options)
    if "://" not in text or text.startswith("file:"):
        store.sweep()
    return store
