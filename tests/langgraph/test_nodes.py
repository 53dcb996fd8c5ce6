"""Tracked nodes: what is recorded, and that LangGraph sees the same node as before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.runtime import Runtime
from langgraph.types import Command, Overwrite, StreamWriter
from typing_extensions import TypedDict

from patchkv_agents.context import EditKind
from patchkv_agents.errors import ContextError, InputError
from patchkv_langgraph import GraphHistory, track_edits, versioned_messages

from .graphs import chain, config, edits, question, replaced, texts


@pytest.fixture
def history() -> GraphHistory:
    return GraphHistory()


class WithOther(MessagesState):
    other: int


class OnlyMessages(TypedDict):
    messages: list[Any]


def refresh(state: MessagesState) -> dict[str, Any]:
    return {"messages": [replaced(state, "on its way")]}


REFRESHED = [("replace_tool_result", "refresh", 1)]


def test_a_replaced_tool_result_is_an_edit_of_the_node(history: GraphHistory) -> None:
    chain(track_edits(refresh, history=history)).invoke(question(), config())
    assert edits(history) == REFRESHED
    newest, first = history.log("t")
    assert texts(first) == ["Where is my order?", "in the warehouse"]
    assert texts(newest) == ["Where is my order?", "on its way"]
    assert newest.edits[0].message_ids == ("result",)
    assert newest.edits[0].tool_call_ids == ("call",)
    assert newest.checkpoint_id == first.checkpoint_id is not None


def test_a_declared_kind_is_that_of_changed_messages_and_not_of_new_ones(
    history: GraphHistory,
) -> None:
    @track_edits(history=history, kind=EditKind.REFRESH_EVIDENCE, author="warehouse")
    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [replaced(state, "on its way"), AIMessage("It is on its way.")]}

    chain(node).invoke(question(), config())
    assert edits(history) == [("refresh_evidence", "warehouse", 1), ("append", "warehouse", None)]


def test_a_summary_of_several_messages_is_one_edit(history: GraphHistory) -> None:
    @track_edits(history=history, kind="summarize")
    def compact(state: MessagesState) -> dict[str, Any]:
        gone = [RemoveMessage(id=str(message.id)) for message in state["messages"][:2]]
        return {"messages": [*gone, HumanMessage("They asked for an order.", id="summary")]}

    chain(compact).invoke(question(HumanMessage("And now?", id="now")), config())
    (edit,) = history.log("t")[0].edits
    assert (edit.kind, edit.author, edit.old_indices) == (EditKind.SUMMARIZE, "compact", (0, 1))
    assert edit.declared


async def arefresh(state: MessagesState) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"messages": [replaced(state, "on its way")]}


def yields(state: MessagesState) -> Iterator[dict[str, Any]]:
    yield refresh(state)


async def ayields(state: MessagesState) -> AsyncIterator[dict[str, Any]]:
    yield refresh(state)


class Refresher:
    """A node that is an object, and one that is its method."""

    def __call__(self, state: MessagesState) -> dict[str, Any]:
        return refresh(state)

    def method(self, state: MessagesState) -> dict[str, Any]:
        return refresh(state)


@pytest.mark.parametrize(
    "node",
    [
        refresh,
        arefresh,
        yields,
        ayields,
        Refresher(),
        Refresher().method,
        partial(lambda state, text: {"messages": [replaced(state, text)]}, text="on its way"),
        RunnableLambda(refresh),
        RunnableLambda(refresh, afunc=arefresh),
        chain(refresh),
    ],
    ids=[
        "def",
        "async",
        "generator",
        "async generator",
        "object",
        "method",
        "partial",
        "lambda",
        "both",
        "graph",
    ],
)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_form_of_node(node: Any, mode: str, history: GraphHistory) -> None:
    graph = chain(track_edits(node, history=history), names=["refresh"])
    if mode == "async":
        result = asyncio.run(graph.ainvoke(question(), config()))
    elif node in (arefresh, ayields):
        with pytest.raises(TypeError, match="synchronous"):  # as LangGraph says of the node itself
            graph.invoke(question(), config())
        return
    else:
        result = graph.invoke(question(), config())
    assert result["messages"][1].content == "on its way"
    assert edits(history) == REFRESHED


def test_a_decorated_method_of_a_class(history: GraphHistory) -> None:
    class Agent:
        text = "on its way"

        @track_edits(history=history)
        def refresh(self, state: MessagesState) -> dict[str, Any]:
            return {"messages": [replaced(state, self.text)]}

    chain(Agent().refresh).invoke(question(), config())
    assert edits(history) == REFRESHED


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (None, []),
        ({}, []),
        ({"other": 1}, []),
        ({"messages": []}, []),
        (Command(goto=END), []),
        (Command(goto=END, update={"other": 2}), []),
        (Command(update={"messages": [AIMessage("a")]}), ["append"]),
        (Command(update=[("messages", [AIMessage("a")]), ("other", 1)]), ["append"]),
        ({"messages": AIMessage("a")}, ["append"]),
        ({"messages": ("user", "a")}, ["append"]),
        ({"messages": [{"role": "user", "content": "a"}]}, ["append"]),
        (
            [
                Command(update={"messages": [AIMessage("a")]}),
                {"messages": [AIMessage("b")]},
                Command(goto=END),
            ],
            ["append", "append"],
        ),
        ({"messages": [RemoveMessage(id="result")]}, ["delete"]),
        (
            {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), HumanMessage("x", id="n")]},
            ["summarize"],
        ),
        ({"messages": Overwrite([HumanMessage("Where is my order?", id="question")])}, ["delete"]),
    ],
)
def test_every_form_of_result(result: Any, expected: list[str], history: GraphHistory) -> None:
    def node(state: WithOther) -> Any:
        return result

    builder = StateGraph(WithOther)
    builder.add_node("node", track_edits(node, history=history), destinations=(END,))
    builder.add_edge(START, "node")
    final = builder.compile().invoke(question(), config())
    assert sorted(kind for kind, _, _ in edits(history)) == expected
    assert {author for _, author, _ in edits(history)} <= {"node"}
    if updates_messages := (bool(expected) or result == {"messages": []}):
        assert texts(history.log("t")[0]) == [message.text for message in final["messages"]]
    assert bool(history.log("t")) is updates_messages


def test_langgraph_injects_and_infers_as_for_the_node_itself(history: GraphHistory) -> None:
    seen: dict[str, Any] = {}

    @track_edits(history=history)
    def node(
        state: OnlyMessages,
        config: RunnableConfig,
        *,
        runtime: Runtime[Any],
        writer: StreamWriter,
    ) -> Command[Literal["end"]]:
        seen.update(state=state, config=config, runtime=runtime, writer=writer)
        return Command(goto="end", update={"messages": [AIMessage("a")]})

    builder = StateGraph(WithOther)
    builder.add_node(node)
    builder.add_node("end", lambda state: None)
    builder.add_edge(START, "node")
    graph = builder.compile()
    graph.invoke({**question(), "other": 1}, config())
    assert set(seen["state"]) == {"messages"}  # the schema that the annotation names
    assert seen["config"]["configurable"]["thread_id"] == "t"
    assert seen["runtime"].execution_info.thread_id == "t"
    assert callable(seen["writer"])
    assert ("node", "end") in {(edge.source, edge.target) for edge in graph.get_graph().edges}
    assert edits(history) == [("append", "node", None)]


def test_outside_of_a_graph_a_tracked_node_is_the_node(history: GraphHistory) -> None:
    node = track_edits(refresh, history=history)
    assert node(question())["messages"][0].content == "on its way"
    assert history.store.threads() == ()


def test_what_is_changed_in_place_is_seen(history: GraphHistory) -> None:
    def node(state: MessagesState) -> dict[str, Any]:
        state["messages"][1].content = "on its way"
        return {"messages": [state["messages"][1]]}

    chain(track_edits(node, history=history)).invoke(question(), config())
    assert edits(history) == [("replace_tool_result", "node", 1)]
    assert texts(history.log("t")[1])[1] == "in the warehouse"


def test_a_tool_result_may_carry_any_object(history: GraphHistory) -> None:
    def node(state: MessagesState) -> dict[str, Any]:
        message = replaced(state, "on its way")
        return {"messages": [message.model_copy(update={"artifact": object()})]}

    chain(track_edits(node, history=history)).invoke(question(), config())
    assert edits(history) == [("replace_tool_result", "node", 1)]


def test_a_state_that_is_an_object(history: GraphHistory) -> None:
    @dataclass
    class State:
        messages: list[Any] = field(default_factory=list)

    def node(state: State) -> dict[str, Any]:
        return {"messages": [*state.messages, AIMessage("a", id="a")]}

    tracked = track_edits(node, history=history, reducer=lambda old, new: new)
    builder = StateGraph(State)
    builder.add_node("node", tracked)
    builder.add_edge(START, "node")
    builder.compile().invoke(State(question()["messages"]), config())
    assert edits(history) == [("append", "node", None)]


def test_other_keys_and_reducers(history: GraphHistory) -> None:
    class State(TypedDict):
        notes: Annotated[list[Any], versioned_messages]

    def node(state: State) -> dict[str, Any]:
        return {"notes": [("user", "a")]}

    builder = StateGraph(State)
    builder.add_node("node", track_edits(node, history=history, messages_key="notes"))
    builder.add_edge(START, "node")
    final = builder.compile().invoke({"notes": []}, config())
    (message,) = history.log("t", key="notes")[0].messages
    assert (message.text, message.id) == ("a", final["notes"][0].id)
    assert history.keys("t") == ("notes",) and history.log("t") == history.log("t", key="notes")


def test_what_is_no_node_is_refused(history: GraphHistory) -> None:
    with pytest.raises(InputError, match="no node"):
        track_edits(3, history=history)
    with pytest.raises(ContextError, match="no kind"):
        track_edits(refresh, history=history, kind="improve")


def test_the_version_of_a_state_is_known_in_the_node(history: GraphHistory) -> None:
    seen = []

    def ask(state: MessagesState, config: RunnableConfig) -> None:
        seen.append(history.version(state, config))

    chain(track_edits(refresh, history=history), ask).invoke(question(), config())
    assert seen == [history.log("t")[0]]
    with pytest.raises(ContextError, match="in a node"):
        history.version(question(), {})


def test_a_parameter_of_its_own_that_is_named_config(history: GraphHistory) -> None:
    """LangGraph fills in `config` by its annotation. With another one, nothing was recorded, and
    nothing said so."""

    def answer(state: MessagesState, config: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"messages": [AIMessage(f"config is {config}", id="answer")]}

    with pytest.warns(UserWarning, match="typed as 'RunnableConfig'"):
        graph = chain(track_edits(answer, history=history), checkpointer=InMemorySaver())
    state = graph.invoke(question(), config())
    assert state["messages"][-1].content == "config is None"
    assert edits(history) == [("append", "answer", None)]


@pytest.mark.parametrize(
    "wrong", [{"history": "edits.db"}, {"contexts": ["messages"]}, {"contexts": {}}]
)
def test_arguments_of_the_wrong_kind_are_refused(
    wrong: dict[str, Any], history: GraphHistory
) -> None:
    """They ended in an AttributeError, or recorded nothing without a word."""
    with pytest.raises(InputError, match=next(iter(wrong))):
        track_edits(refresh, **{"history": history, **wrong})
