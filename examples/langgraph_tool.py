"""A tool that puts its new result in the place of its earlier one, in a LangGraph agent.

Run it with the embedded model: `python examples/langgraph_tool.py`, or name another one. The model
is too small to call tools by itself, so the calls are scripted; the answers are the model's.
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph_common import Assistant, conversation, show_log

from patchkv_langgraph import GraphHistory, context_tool, track_edits

THEN, NOW = "Order 7 is in the warehouse.", "Order 7 is on a barge."


@context_tool(replaces="previous")
@tool
def order_status(number: int) -> str:
    """Where an order is now."""
    return NOW


def ask_again(state: MessagesState) -> dict[str, Any]:
    """Stands for a model that calls the tool once more."""
    call = {"name": "order_status", "args": {"number": 7}, "id": "order-again"}
    return {"messages": [AIMessage("", tool_calls=[call])]}


def main() -> int:
    """Ask twice; the second time, the tool is called again."""
    history = GraphHistory()
    assistant = Assistant(history)
    builder = StateGraph(MessagesState)
    builder.add_node("ask_again", track_edits(ask_again, history=history))
    builder.add_node("tools", track_edits(ToolNode([order_status]), history=history))
    builder.add_node("assistant", track_edits(assistant, history=history))
    builder.add_conditional_edges(
        START, lambda state: "ask_again" if len(state["messages"]) > 8 else "assistant"
    )
    builder.add_edge("ask_again", "tools")
    builder.add_edge("tools", "assistant")
    graph = builder.compile(checkpointer=history.saver(InMemorySaver()))
    config: Any = {"configurable": {"thread_id": "order-7"}}

    graph.invoke({"messages": conversation(THEN, "Where is order 7?")}, config)
    final = graph.invoke({"messages": [HumanMessage("And where is it now?")]}, config)

    print("edits:")
    edits = show_log(history.log("order-7"))
    print("resumed after the edit:")
    is_recovered = assistant.check()
    is_tracked = ("replace_tool_result", "order_status") in edits
    is_replaced = next(m for m in final["messages"] if m.id == "order").content == NOW
    return 0 if is_tracked and is_replaced and is_recovered else 1


if __name__ == "__main__":
    sys.exit(main())
