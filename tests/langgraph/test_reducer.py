"""The reducer does what LangGraph's does, any number of times."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    ToolMessage,
)
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from typing_extensions import TypedDict

from patchkv_langgraph import GraphHistory, track_edits, versioned_messages

from .graphs import config, texts

IDS = st.sampled_from([None, "a", "b", "c"])
TEXTS = st.sampled_from(["", "yes", "no"])
MESSAGES = st.builds(lambda text, id: HumanMessage(text, id=id), TEXTS, IDS) | st.builds(
    lambda text, id: AIMessage(text, id=id), TEXTS, IDS
)


def distinct(messages: list[BaseMessage]) -> bool:
    named = [message.id for message in messages if message.id]
    return len(named) == len(set(named))


@given(st.lists(MESSAGES, max_size=5).filter(distinct), st.lists(MESSAGES, max_size=5))
def test_it_does_what_add_messages_does(left: list[Any], right: list[Any]) -> None:
    def copies(messages: list[Any]) -> list[Any]:
        return [message.model_copy() for message in messages]

    ours = versioned_messages(left, right)
    assert ours == versioned_messages(copies(left), copies(right))  # each time the same
    theirs = add_messages(copies(left), copies(right))
    assert [(m.type, m.content) for m in ours] == [(m.type, m.content) for m in theirs]
    assert [m.id for m in theirs if m.id in "abc"] == [m.id for m in ours if str(m.id) in "abc"]
    assert len({message.id for message in ours}) == len(ours) and None not in ours


def test_nothing_that_is_passed_in_changes() -> None:
    left, right = [HumanMessage("a")], [AIMessage("b")]
    merged = versioned_messages(left, right)
    assert left[0].id is None and right[0].id is None
    assert len(left) == len(right) == 1
    assert None not in {message.id for message in merged}


def test_equal_messages_stay_two_even_where_places_shift() -> None:
    """An id made from the place alone would replace the message that had the place before."""
    first = versioned_messages([], [HumanMessage("yes"), HumanMessage("yes")])
    shorter = versioned_messages(first, [RemoveMessage(id=str(first[0].id))])
    longer = versioned_messages(shorter, HumanMessage("yes"))
    assert [message.content for message in longer] == ["yes", "yes"]


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (("user", "b"), ["a", "b"]),
        ({"role": "user", "content": "b"}, ["a", "b"]),
        ([AIMessageChunk("b")], ["a", "b"]),
        ([RemoveMessage(id="a")], []),
        ([RemoveMessage(id=REMOVE_ALL_MESSAGES), ("user", "b")], ["b"]),
        ([HumanMessage("b", id="a")], ["b"]),
    ],
)
def test_forms_of_updates(update: Any, expected: list[str]) -> None:
    merged = versioned_messages([HumanMessage("a", id="a")], update)
    assert [message.content for message in merged] == expected
    assert AIMessageChunk not in {type(message) for message in merged}


def test_removing_what_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="doesn't exist"):
        versioned_messages([], [RemoveMessage(id="a")])


def test_versions_have_the_ids_of_the_state() -> None:
    """Values without an id get the same one in the version and in the state."""

    class State(TypedDict):
        messages: Annotated[list[AnyMessage], versioned_messages]

    def node(state: State) -> dict[str, Any]:
        return {"messages": [("assistant", "b"), ToolMessage("c", tool_call_id="d")]}

    history = GraphHistory()
    builder = StateGraph(State)
    builder.add_node("node", track_edits(node, history=history, reducer=versioned_messages))
    builder.add_edge(START, "node")
    graph = builder.compile(checkpointer=history.saver(InMemorySaver()))
    for _ in range(2):
        final = graph.invoke({"messages": [("user", "a")]}, config())
    newest = history.log("t")[0]
    assert [m.id for m in newest.messages] == [m.id for m in final["messages"]]
    assert texts(newest) == ["a", "b", "c"] * 2
    assert len(history.open("t")) == 4
