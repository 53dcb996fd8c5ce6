"""Blob names: `tenant/thread/kind-...`, built from hashes.

Any text can be a thread's id. Hashes are valid names in every store, have a fixed length and are
equal only for equal keys. The manifest holds the key itself, and readers compare it.
"""

from __future__ import annotations

import hashlib
import json
import uuid

from patchkv_agents.checkpoint.key import CheckpointKey
from patchkv_agents.checkpoint.serialization import Manifest, PayloadRecord


def folder_of(key: CheckpointKey) -> str:
    """Folder of all blobs of the key's thread."""
    return f"{_hash(key.tenant)}/{_hash(key.tenant, key.thread)}"


def folder_in(name: str) -> str:
    """Folder of a blob."""
    return name.rsplit("/", 1)[0]


def manifest_of(key: CheckpointKey) -> str:
    """Manifest of a version."""
    return f"{folder_of(key)}/manifest-{_version(key)}"


def is_manifest(name: str) -> bool:
    """Whether a blob is a manifest."""
    return name.rsplit("/", 1)[-1].startswith("manifest-")


def is_manifest_in_scope_of(key: CheckpointKey, name: str) -> bool:
    """Whether a blob is the manifest of any version of the key's thread, model and namespace."""
    return name.startswith(f"{folder_of(key)}/manifest-{_scope(key)}-")


def new_arrays_of(key: CheckpointKey) -> str:
    """A new name for the arrays of a version; readers may still use those of an earlier save."""
    return f"{folder_of(key)}/arrays-{_version(key)}-{uuid.uuid4().hex}"


def part_of(folder: str, payload: str, part: int) -> str:
    """A part of a payload."""
    return f"{folder}/part-{payload}-{part}"


def parts_of(folder: str, record: PayloadRecord) -> list[str]:
    """All parts of a payload."""
    return [part_of(folder, record.id, part) for part in range(len(record.checksums))]


def blobs_of(manifest: Manifest) -> list[str]:
    """All blobs of a version, the manifest included."""
    folder = folder_of(manifest.key)
    parts = [name for record in manifest.payloads for name in parts_of(folder, record)]
    return [manifest_of(manifest.key), manifest.arrays, *parts]


def _scope(key: CheckpointKey) -> str:
    return _hash(key.fingerprint, key.tenant, key.thread, key.namespace)


def _version(key: CheckpointKey) -> str:
    return f"{_scope(key)}-{_hash(key.version)}"


def _hash(*texts: str) -> str:
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).hexdigest()
