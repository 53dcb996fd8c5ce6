"""A graph for LangGraph Studio whose edits of its context are seen there.

Run `langgraph dev` in this folder (`pip install "langgraph-cli[inmem]"`) and send a message. Each
edit is a custom event `patchkv_edit`, and in the metadata of the node's run where LangSmith traces
it; `patchkv log edits.db` prints them all. No model is needed: the answers are fixed.

The server brings its own checkpointer, so that there is no `history.saver` here; it is asked where
a run goes on from (see docs/langgraph.md).
"""

from __future__ import annotations

import os
from typing import Annotated, Any

from langchain_core.messages import AIMessage, AnyMessage, ToolMessage
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from typing_extensions import TypedDict

from patchkv_langgraph import GraphHistory, track_edits

history = GraphHistory(os.environ.get("PATCHKV_HISTORY", "edits.db"))
PLACES = ("in the warehouse", "on a barge", "at the quay")


class State(TypedDict):
    """The conversation, and the agent's plan."""

    messages: Annotated[list[AnyMessage], add_messages]
    plan: list[str]


@track_edits(history=history, kind="refresh_evidence")
async def look(state: State) -> dict[str, Any]:
    """Look the order up, and put what is new in the place of what was."""
    asked = sum(message.type == "human" for message in state["messages"])
    result = ToolMessage(
        f"Order 7 is {PLACES[asked % len(PLACES)]}.", tool_call_id="order", id="order"
    )
    if any(message.id == "order" for message in state["messages"]):
        return {"messages": [result]}
    call = {"name": "order_status", "args": {"number": 7}, "id": "order"}
    return {"messages": [AIMessage("", tool_calls=[call]), result]}


@track_edits(history=history, contexts={"plan": None})
def plan(state: State) -> dict[str, Any]:
    """Revise the plan."""
    done = [f"{step} (done)" for step in state.get("plan") or () if "(done)" not in step]
    return {"plan": [*done, f"answer question {len(done) + 1}"]}


@track_edits(history=history)
async def answer(state: State) -> dict[str, Any]:
    """Answer with what the lookup said."""
    found = next(message for message in state["messages"] if message.id == "order")
    return {"messages": [AIMessage(str(found.content))]}


builder = StateGraph(State)
builder.add_node("look", look)
builder.add_node("plan", plan)
builder.add_node("answer", answer)
builder.add_edge(START, "look")
builder.add_edge("look", "plan")
builder.add_edge("plan", "answer")
graph = builder.compile()
