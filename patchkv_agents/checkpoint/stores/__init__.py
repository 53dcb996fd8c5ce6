"""Stores of checkpoints: memory, local folders, object stores, Redis; one protocol for all."""

from __future__ import annotations

from patchkv_agents.checkpoint.key import CheckpointKey
from patchkv_agents.checkpoint.stores.base import CheckpointLoad, CheckpointStore, StoreStats
from patchkv_agents.checkpoint.stores.blob_store import BlobCheckpointStore
from patchkv_agents.checkpoint.stores.memory import MemoryStore
from patchkv_agents.checkpoint.stores.opening import open_store

__all__ = [
    "BlobCheckpointStore",
    "CheckpointKey",
    "CheckpointLoad",
    "CheckpointStore",
    "MemoryStore",
    "StoreStats",
    "open_store",
]
