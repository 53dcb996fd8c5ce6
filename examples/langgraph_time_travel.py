"""Time travel and forks in LangGraph: each has its own branch, and all share the stored state.

Run it with the embedded model: `python examples/langgraph_time_travel.py`, or name another one.
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph_common import Assistant, conversation, show_log

from patchkv_langgraph import GraphHistory, track_edits


def main() -> int:
    """Ask twice, go back to the first answer and ask something else, then change the past."""
    history = GraphHistory()
    assistant = Assistant(history)
    builder = StateGraph(MessagesState)
    builder.add_node("assistant", track_edits(assistant, history=history))
    builder.add_edge(START, "assistant")
    graph = builder.compile(checkpointer=history.saver(InMemorySaver()))
    config: Any = {"configurable": {"thread_id": "order-7"}}

    graph.invoke({"messages": conversation("Order 7 is lost.", "Where is order 7?")}, config)
    first = graph.get_state(config)
    graph.invoke({"messages": [HumanMessage("Who lost it?")]}, config)

    # Time travel: from the first answer on, another question.
    graph.invoke({"messages": [HumanMessage("What did it hold?")]}, first.config)

    # A fork: at the same place the tool result was another one, and the first question is asked.
    order = next(message for message in first.values["messages"] if message.id == "order")
    changed = order.model_copy(update={"content": "Order 7 is on a barge."})
    fork = graph.update_state(first.config, {"messages": [changed]})
    graph.invoke({"messages": [HumanMessage("So where is it?")]}, fork)

    branches = history.open("order-7").branches()
    for name in branches:
        print(f"branch {name}:")
        show_log(history.open("order-7").log(name))
    print("resumed for the second question, after time travel, and on the fork:")
    is_recovered = assistant.check()
    edits = {(str(edit.kind), edit.author) for v in history.log("order-7") for edit in v.edits}
    is_tracked = len(branches) == 3 and ("replace_tool_result", "update_state") in edits
    return 0 if is_tracked and is_recovered else 1


if __name__ == "__main__":
    sys.exit(main())
