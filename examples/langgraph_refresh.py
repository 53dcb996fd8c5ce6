"""A LangGraph agent whose node refreshes a stale tool result before the model is asked again.

Run it with the embedded model: `python examples/langgraph_refresh.py`, or name another one.
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph_common import Assistant, conversation, show_log

from patchkv_langgraph import GraphHistory, track_edits

THEN, NOW = "Order 7 is in the warehouse.", "Order 7 is on a barge."
SHOP = {"answer": THEN}


def refresh(state: MessagesState) -> dict[str, Any] | None:
    """Look the order up again, and put what is new in the place of what was."""
    stale = next(message for message in state["messages"] if message.id == "order")
    if stale.content == SHOP["answer"]:
        return None
    return {"messages": [stale.model_copy(update={"content": SHOP["answer"]})]}


def main() -> int:
    """Ask twice; the order moves in between."""
    history = GraphHistory()  # or GraphHistory("agent.db")
    assistant = Assistant(history)
    builder = StateGraph(MessagesState)
    builder.add_node("refresh", track_edits(refresh, history=history, kind="refresh_evidence"))
    builder.add_node("assistant", track_edits(assistant, history=history))
    builder.add_edge(START, "refresh")
    builder.add_edge("refresh", "assistant")
    graph = builder.compile(checkpointer=history.saver(InMemorySaver()))
    config: Any = {"configurable": {"thread_id": "order-7"}}

    graph.invoke({"messages": conversation(THEN, "Where is order 7?")}, config)
    SHOP["answer"] = NOW
    graph.invoke({"messages": [HumanMessage("And where is it now?")]}, config)

    print("edits:")
    edits = show_log(history.log("order-7"))
    print("resumed after the edit:")
    is_recovered = assistant.check()
    is_tracked = ("refresh_evidence", "refresh") in edits
    return 0 if is_tracked and is_recovered else 1


if __name__ == "__main__":
    sys.exit(main())
