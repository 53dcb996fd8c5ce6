"""Tracks what the nodes and tools of a LangGraph graph do to the context.

    history = GraphHistory("agent.db")
    builder.add_node("refresh", track_edits(refresh, history=history))
    graph = builder.compile(checkpointer=history.saver(InMemorySaver()))

Every change that a tracked node makes becomes a version with its edits, under the node's name; time
travel, forks and `update_state` get branches of their own. The public names are imported at first
use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchkv_langgraph.history import GraphHistory
    from patchkv_langgraph.marks import EditMark, mark_of, marked, marked_edits
    from patchkv_langgraph.nodes import track_edits
    from patchkv_langgraph.reducer import versioned_messages
    from patchkv_langgraph.saver import TrackedSaver
    from patchkv_langgraph.tools import context_tool

__all__ = [
    "EditMark",
    "GraphHistory",
    "TrackedSaver",
    "context_tool",
    "mark_of",
    "marked",
    "marked_edits",
    "track_edits",
    "versioned_messages",
]

_MODULE_OF = {
    "EditMark": "marks",
    "GraphHistory": "history",
    "TrackedSaver": "saver",
    "context_tool": "tools",
    "mark_of": "marks",
    "marked": "marks",
    "marked_edits": "marks",
    "track_edits": "nodes",
    "versioned_messages": "reducer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
