"""Tracks what the nodes and tools of a LangGraph graph do to the context.

    history = GraphHistory("agent.db")
    builder.add_node("refresh", track_edits(refresh, history=history))
    graph = builder.compile(checkpointer=history.saver(InMemorySaver()))

Every change that a tracked node makes becomes a version with its edits, under the node's name; time
travel, forks and `update_state` get branches of their own. The public names are imported at first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchkv_agents.lazy import lazy_exports

if TYPE_CHECKING:
    from patchkv_langgraph.history import GraphHistory
    from patchkv_langgraph.marks import EditMark, mark_of, marked, marked_edits
    from patchkv_langgraph.nodes import track_edits
    from patchkv_langgraph.notices import TrackingWarning
    from patchkv_langgraph.parts import StatePart
    from patchkv_langgraph.reducer import versioned_messages
    from patchkv_langgraph.saver import TrackedSaver
    from patchkv_langgraph.tools import context_tool

__all__ = [
    "EditMark",
    "GraphHistory",
    "StatePart",
    "TrackedSaver",
    "TrackingWarning",
    "context_tool",
    "mark_of",
    "marked",
    "marked_edits",
    "track_edits",
    "versioned_messages",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "EditMark": "patchkv_langgraph.marks",
        "GraphHistory": "patchkv_langgraph.history",
        "StatePart": "patchkv_langgraph.parts",
        "TrackedSaver": "patchkv_langgraph.saver",
        "TrackingWarning": "patchkv_langgraph.notices",
        "context_tool": "patchkv_langgraph.tools",
        "mark_of": "patchkv_langgraph.marks",
        "marked": "patchkv_langgraph.marks",
        "marked_edits": "patchkv_langgraph.marks",
        "track_edits": "patchkv_langgraph.nodes",
        "versioned_messages": "patchkv_langgraph.reducer",
    },
    installed_by={"langgraph": "langgraph", "langchain_core": "langgraph"},
)
