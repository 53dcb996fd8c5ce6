from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint.stores.servers import redis_server


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis server of our own for tests that leave it alive. Use a prefix of your own."""
    with redis_server() as server:
        yield server.url
