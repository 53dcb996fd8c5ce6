"""Branches of a LangGraph thread: a call recovers from what its own line made, and nothing else."""

from __future__ import annotations

import asyncio
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AnyMessage, BaseMessage, HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send

from patchkv_langchain import ChatPatchKV

if TYPE_CHECKING:
    from patchkv_agents.context import ContextVersion
    from patchkv_agents.engine import Engine, Thread

PAGE = "All is as it was, and the ferry leaves at ten. " * 16
SYSTEM = SystemMessage("You answer questions about a long page.", id="s")


def thread_of(engine: Engine) -> Thread:
    (thread,) = engine.pool.threads()
    return thread


def parent(thread: Thread, version: ContextVersion) -> str:
    return version.parents[0]


def graph_of(model: ChatPatchKV, saver: Any) -> Any:
    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke([SYSTEM, *state["messages"]])]}

    builder = StateGraph(MessagesState)
    builder.add_node(answer)
    builder.add_edge(START, "answer")
    return builder.compile(checkpointer=saver)


def say(graph: Any, text: str, config: Any) -> Any:
    return graph.invoke({"messages": [HumanMessage(text)]}, config)["messages"][-1]


def recovery(message: BaseMessage) -> Any:
    return message.response_metadata["recovery"]


@pytest.mark.parametrize("durability", ["async", "sync", "exit"])
def test_a_fork_is_told_from_an_edit_of_the_last_message(
    chat_engine: Engine, durability: Any
) -> None:
    """By its messages alone, a last message said otherwise could be either."""
    model = ChatPatchKV(engine=chat_engine, policy="default", max_tokens=4)
    graph = graph_of(model, InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}

    def turn(text: str, config: Any) -> Any:
        asked = {"messages": [HumanMessage(text)]}
        return graph.invoke(asked, config, durability=durability)["messages"][-1]

    turn("Read this. " + PAGE, config)
    early = graph.get_state(config).config
    turn("Go left. " + PAGE, config)
    forked = turn("Go right, please. " + PAGE, early)
    thread = thread_of(chat_engine)
    first, left, right = map(thread.history.get, thread.history.version_ids())
    assert parent(thread, left) == parent(thread, right) == first.id
    assert recovery(forked)["is_exact"] and recovery(forked)["restored"] == 0
    assert recovery(forked)["new"] > 150  # the other branch's page was no help


def test_update_state_begins_a_branch_at_its_checkpoint(chat_engine: Engine) -> None:
    model = ChatPatchKV(engine=chat_engine, policy="default", max_tokens=4)
    graph = graph_of(model, InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}
    say(graph, "Read this. " + PAGE, config)
    say(graph, "And now?", config)
    past = [s for s in graph.get_state_history(config) if s.next == ("answer",)][1]
    said = past.values["messages"][0]
    changed = HumanMessage("Read this carefully. " + PAGE, id=said.id)
    fork = graph.update_state(past.config, {"messages": [changed]})
    graph.invoke(None, fork)
    thread = thread_of(chat_engine)
    first, second, edited = map(thread.history.get, thread.history.version_ids())
    assert parent(thread, second) == parent(thread, edited) == first.id
    assert [str(edit.kind) for edit in edited.edits] != ["append"]


def test_replaying_a_checkpoint_asks_its_version_again(chat_engine: Engine) -> None:
    model = ChatPatchKV(engine=chat_engine, policy="default", max_tokens=4)
    graph = graph_of(model, InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}
    say(graph, "Read this. " + PAGE, config)
    say(graph, "And now?", config)
    past = [s for s in graph.get_state_history(config) if s.next == ("answer",)][1]
    graph.invoke(None, past.config)
    thread = thread_of(chat_engine)
    first, _ = thread.history.version_ids()
    assert thread.history.head is not None and thread.history.head.id == first


class Questions(TypedDict):
    messages: Annotated[list[AnyMessage], operator.add]
    answers: Annotated[list[AnyMessage], operator.add]


@pytest.mark.parametrize("saver", [None, InMemorySaver()], ids=["no-saver", "saver"])
def test_tasks_side_by_side_share_what_is_exact_alone(chat_engine: Engine, saver: Any) -> None:
    """Tasks that were sent to one node: each took the one before for its past."""
    model = ChatPatchKV(engine=chat_engine, policy="default", max_tokens=4)

    def plan(state: Questions) -> dict[str, Any]:
        return {}

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        return {"answers": [model.invoke([SYSTEM, HumanMessage(question["text"])])]}

    builder = StateGraph(Questions)
    builder.add_node(plan)
    builder.add_node("ask", ask)  # type: ignore[type-var]
    builder.add_edge(START, "plan")
    texts = [f"Question {number}. {PAGE}" for number in range(3)]
    builder.add_conditional_edges(
        "plan", lambda state: [Send("ask", {"text": text}) for text in texts], ["ask"]
    )
    graph = builder.compile(checkpointer=saver)
    config: Any = {"configurable": {"thread_id": "t"}}
    answers = graph.invoke({"messages": []}, config)["answers"]
    assert len(chat_engine.pool.threads()) == len(texts)
    assert all(len(thread.history.log()) == 1 for thread in chat_engine.pool.threads())
    assert [recovery(answer)["restored"] for answer in answers] == [0, 0, 0]
    shared = [recovery(answer)["prefix"] for answer in answers]
    assert sorted(shared)[0] == 0 < sorted(shared)[1]  # the common beginning is exact


@pytest.mark.parametrize("policy", ["exact", "default"])
def test_a_linear_run_loses_nothing_by_it(chat_engine: Engine, policy: str) -> None:
    """Rows per call are those of a plain loop over the same contexts."""
    model = ChatPatchKV(engine=chat_engine, policy=policy, max_tokens=4)
    graph = graph_of(model, InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}
    rows = []
    for turn in range(4):
        rows.append(recovery(say(graph, f"Question {turn}. {PAGE}", config)))
        state = graph.get_state(config).values["messages"]
        graph.update_state(
            config, {"messages": [HumanMessage(f"Note {turn}. {PAGE}", id=state[0].id)]}
        )
    thread = thread_of(chat_engine)
    assert len(thread.history.log()) == len(thread.history.version_ids()) == 4
    plain = chat_engine.thread("plain")
    for version, report in zip(reversed(thread.history.log()), rows, strict=True):
        same = plain.generate(
            version.messages,
            policy=None if policy == "exact" else _default(),
            max_new_tokens=4,
        ).report
        names = ("prefix", "new", "window", "attention", "tail", "restored")
        assert {name: report[name] for name in names} == {
            name: getattr(same, name) for name in names
        }


def _default() -> Any:
    from patchkv_agents.recovery import RecoveryPolicy

    return RecoveryPolicy.default()


def test_a_saver_in_the_event_loop_tells_of_forks(chat_engine: Engine, tmp_path: Path) -> None:
    """It can only be asked in the loop, where the call of the model does not run."""
    model = ChatPatchKV(engine=chat_engine, policy="default", max_tokens=4)

    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([SYSTEM, *state["messages"]])]}

    async def turns() -> Any:
        async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "graph.db")) as saver:
            builder = StateGraph(MessagesState)
            builder.add_node(answer)
            builder.add_edge(START, "answer")
            graph = builder.compile(checkpointer=saver)
            config: Any = {"configurable": {"thread_id": "t"}}
            await graph.ainvoke({"messages": [HumanMessage("Read this. " + PAGE)]}, config)
            early = (await graph.aget_state(config)).config
            await graph.ainvoke({"messages": [HumanMessage("Go left. " + PAGE)]}, config)
            return await graph.ainvoke({"messages": [HumanMessage("Go right. " + PAGE)]}, early)

    forked = asyncio.run(turns())["messages"][-1]
    thread = thread_of(chat_engine)
    first, left, right = map(thread.history.get, thread.history.version_ids())
    assert parent(thread, left) == parent(thread, right) == first.id
    assert recovery(forked)["is_exact"] and recovery(forked)["restored"] == 0
