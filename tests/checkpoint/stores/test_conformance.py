"""Every shipped store passes the shipped conformance suite."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from patchkv_agents.checkpoint.stores import BlobCheckpointStore, CheckpointStore, MemoryStore
from patchkv_agents.checkpoint.stores.conformance import StoreConformance
from patchkv_agents.checkpoint.stores.objects import open_objects
from patchkv_agents.checkpoint.stores.redis import open_redis
from tests.checkpoint.stores.servers import s3_server


class TestMemory(StoreConformance):
    def new_handles(self) -> tuple[CheckpointStore, CheckpointStore]:
        store = MemoryStore()
        return store, store


class TestFolder(StoreConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "store"

    def new_handles(self) -> tuple[CheckpointStore, CheckpointStore]:
        url = self.folder.as_uri()
        return (
            BlobCheckpointStore(open_objects(self.folder)),
            BlobCheckpointStore(open_objects(url)),
        )


class TestS3(StoreConformance):
    @pytest.fixture(autouse=True)
    def _bucket(self) -> Iterator[None]:
        with s3_server() as self.port:
            yield

    def new_handles(self) -> tuple[CheckpointStore, CheckpointStore]:
        bucket = uuid.uuid4().hex
        one, other = (
            open_objects(
                f"s3://{bucket}/some/prefix",
                endpoint=f"http://127.0.0.1:{self.port}",
                region="nowhere",
                skip_signature=True,
                client_options={"allow_http": True},
            )
            for _ in range(2)
        )
        return BlobCheckpointStore(one), BlobCheckpointStore(other)


class TestObstoreMemory(StoreConformance):
    def new_handles(self) -> tuple[CheckpointStore, CheckpointStore]:
        blobs = open_objects("memory:///")
        return BlobCheckpointStore(blobs), BlobCheckpointStore(blobs)


class TestSmallParts(StoreConformance):
    """Parts far smaller than a layer, of a size that divides nothing."""

    def new_handles(self) -> tuple[CheckpointStore, CheckpointStore]:
        blobs = open_objects("memory:///")
        return (
            BlobCheckpointStore(blobs, part_bytes=10_007),
            BlobCheckpointStore(blobs, part_bytes=4093),
        )


class TestRedis(StoreConformance):
    @pytest.fixture(autouse=True)
    def _redis(self, redis_url: str) -> None:
        self.url = redis_url

    def new_handles(self) -> tuple[CheckpointStore, CheckpointStore]:
        prefix = f"{uuid.uuid4().hex}/"
        one, other = (open_redis(self.url, prefix=prefix) for _ in range(2))
        return BlobCheckpointStore(one), BlobCheckpointStore(other)
