"""Both stores pass the suite that is shipped for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchkv_agents.context.stores import HistoryStore, MemoryHistoryStore, SQLiteHistoryStore
from patchkv_agents.context.stores.conformance import HistoryStoreConformance


class TestMemoryHistoryStore(HistoryStoreConformance):
    def open_store(self) -> HistoryStore:
        return MemoryHistoryStore()


class TestSQLiteHistoryStore(HistoryStoreConformance):
    @pytest.fixture(autouse=True)
    def _path(self, tmp_path: Path) -> None:
        self.path = tmp_path / "a history?.db"

    def open_store(self) -> HistoryStore:
        return SQLiteHistoryStore(self.path)

    def reopen(self, store: HistoryStore) -> HistoryStore:
        store.close()
        return SQLiteHistoryStore(self.path)
