"""Graphs of fake nodes, and what their histories say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph

from patchkv_agents.context import ContextVersion
from patchkv_langgraph import GraphHistory

Graph = CompiledStateGraph[Any, Any, Any, Any]


def config(thread: str = "t") -> dict[str, Any]:
    return {"configurable": {"thread_id": thread}}


def chain(*nodes: Any, checkpointer: Any = None, names: Sequence[str] = ()) -> Graph:
    """A graph that runs nodes one after the other."""
    builder: StateGraph[Any, Any, Any, Any] = StateGraph(MessagesState)
    before = START
    for number, node in enumerate(nodes):
        name = names[number] if names else node.__name__
        builder.add_node(name, node)
        builder.add_edge(before, name)
        before = name
    return builder.compile(checkpointer=checkpointer)


def question(*more: BaseMessage) -> dict[str, Any]:
    """A state with a tool result (message 1) that can go stale."""
    return {
        "messages": [
            HumanMessage("Where is my order?", id="question"),
            ToolMessage("in the warehouse", tool_call_id="call", id="result"),
            *more,
        ]
    }


def replaced(state: Any, content: str, index: int = 1) -> BaseMessage:
    message: BaseMessage = state["messages"][index].model_copy(update={"content": content})
    return message


def edits(history: GraphHistory, thread: str = "t", namespace: str = "") -> list[tuple[Any, ...]]:
    """Kind, author and old index of each edit that led to the last version, oldest first."""
    return [
        (str(edit.kind), edit.author, edit.old_index)
        for version in reversed(history.log(thread, namespace))
        for edit in version.edits
    ]


def texts(version: ContextVersion) -> list[str]:
    return [message.text for message in version.messages]
