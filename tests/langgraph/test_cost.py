"""What tracking a node costs, in calls of functions: next to nothing for what did not change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph.graph import END, START, MessagesState, StateGraph

from patchkv_agents.context import Message, infer_edits, parse_messages
from patchkv_langgraph import GraphHistory, track_edits
from tests.operations import count_calls

CALLS_A_MESSAGE = 10
"""Of an unchanged message, from the node's start to the end of the commit."""

CONFIG: Any = {"configurable": {"thread_id": "t"}}


class State(MessagesState):
    """Messages, and what each run is told."""

    step: int


def conversation(count: int) -> list[BaseMessage]:
    """Turns of a question, a call, its result and an answer."""
    messages: list[BaseMessage] = []
    for i in range(0, count, 4):
        call = {"name": "search", "args": {"query": f"topic {i}"}, "id": f"c{i}"}
        messages += [
            HumanMessage(f"Question {i}", id=f"q{i}"),
            AIMessage("", id=f"call{i}", tool_calls=[call]),
            ToolMessage(f"Result {i}", id=f"r{i}", tool_call_id=f"c{i}"),
            AIMessage(f"Answer {i}", id=f"a{i}"),
        ]
    return messages


def append(state: State) -> dict[str, Any]:
    return {"messages": [AIMessage(f"Step {state['step']}", id=f"s{state['step']}")]}


def edit(state: State) -> dict[str, Any]:
    """A fresh result in the place of one in the middle."""
    old = state["messages"][len(state["messages"]) // 8 * 4 + 2]
    assert isinstance(old, ToolMessage)
    text = f"Fresh {state['step']}"
    return {"messages": [ToolMessage(text, id=old.id, tool_call_id=old.tool_call_id)]}


def graph_of(node: Any) -> Any:
    """A graph of one node, without a checkpointer."""
    builder = StateGraph(State)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    builder.add_edge("node", END)
    return builder.compile()


def added_calls(history: GraphHistory, node: Any, count: int, steps: int = 6) -> list[int]:
    """The calls that tracking adds to each of some runs, one after the other."""
    calls: dict[str, list[int]] = {"bare": [], "tracked": []}
    for name in calls:
        graph = graph_of(node if name == "bare" else track_edits(node, history=history))
        messages: Sequence[BaseMessage] = conversation(count)
        for step in range(steps):
            result: dict[str, Any] = {}

            def run(
                graph: Any = graph, given: Any = messages, step: int = step, into: Any = result
            ) -> None:
                into.update(graph.invoke({"messages": given, "step": step}, CONFIG))

            calls[name].append(count_calls(run))
            messages = result["messages"]
    return [more - less for less, more in zip(calls["bare"], calls["tracked"], strict=True)]


@pytest.mark.parametrize("node", [append, edit])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_an_unchanged_message_costs_a_comparison(node: Any, kind: str, tmp_path: Path) -> None:
    """Tracking read, hashed, matched and looked up each of 300 messages several times a step.

    A node took 3 ms more than the bare one, an edit in the middle 8. What a message holds is
    compared with what it held before, since programs change messages in place; that is all.
    """
    costs = []
    for count in (200, 400):
        path = tmp_path / f"{count}.db"
        history = GraphHistory(path if kind == "sqlite" else None)
        costs.append(min(added_calls(history, node, count)[2:]))
    assert costs[1] - costs[0] < 200 * CALLS_A_MESSAGE
    assert costs[0] < 200 * CALLS_A_MESSAGE + 2_000


def test_cost_grows_with_what_changed(tmp_path: Path) -> None:
    """The two hundredth step costs what the tenth does, but for the messages that came since."""
    costs = added_calls(GraphHistory(tmp_path / "edits.db"), append, 40, steps=200)
    early, late = min(costs[8:16]), min(costs[-8:])
    assert late - early < 184 * CALLS_A_MESSAGE + 200


def test_matching_looks_at_the_middle_alone() -> None:
    """Messages that are the same objects at both ends are not looked at one by one."""
    messages = parse_messages([{"role": "user", "content": f"Note {i}"} for i in range(1_000)])
    changed = (*messages[:500], Message("user", "Other"), *messages[501:])
    assert count_calls(lambda: infer_edits(messages, changed)) < 800
    assert count_calls(lambda: infer_edits(messages, messages)) < 100
    (edit_,) = infer_edits(messages, changed)
    assert (edit_.old_indices, edit_.new_indices) == ((500,), (500,))


def test_a_change_in_place_is_seen() -> None:
    """Nodes that write into the messages they are given are recorded, fast or not."""

    def rewrite(state: State) -> dict[str, Any]:
        state["messages"][2].content = "Written over"
        state["messages"][1].tool_calls[0]["args"]["query"] = "other"  # type: ignore[attr-defined]
        return {"messages": []}

    history = GraphHistory()
    graph = graph_of(track_edits(rewrite, history=history))
    graph.invoke({"messages": conversation(8), "step": 0}, CONFIG)
    head = history.open("t").show()
    assert sorted(i for edit in head.edits for i in edit.new_indices) == [1, 2]
