"""History stores: the protocol, a store in memory, a store in an SQLite file."""

from patchkv_agents.context.stores.base import HistoryStore
from patchkv_agents.context.stores.memory import MemoryHistoryStore
from patchkv_agents.context.stores.sqlite import SQLiteHistoryStore

__all__ = ["HistoryStore", "MemoryHistoryStore", "SQLiteHistoryStore"]
