"""Interrupts, retries, crashes, parallel nodes and subgraphs: every edit once, none lost."""

from __future__ import annotations

import asyncio
import operator
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt

from patchkv_langgraph import GraphHistory, track_edits

from .graphs import chain, config, edits, question, replaced, texts


@pytest.fixture
def history() -> GraphHistory:
    return GraphHistory()


class Fan(MessagesState):
    item: str
    seen: Annotated[list[str], operator.add]


def test_an_interrupted_node_is_recorded_once_it_is_through(history: GraphHistory) -> None:
    def approve(state: MessagesState) -> dict[str, Any]:
        return {"messages": [replaced(state, interrupt("new text?"))]}

    graph = chain(track_edits(approve, history=history), checkpointer=InMemorySaver())
    graph.invoke(question(), config())
    assert history.log("t") == ()
    graph.invoke(Command(resume="on its way"), config())
    assert edits(history) == [("replace_tool_result", "approve", 1)]


def test_retries_count_once(history: GraphHistory) -> None:
    attempts = []

    def flaky(state: MessagesState) -> dict[str, Any]:
        attempts.append(1)
        if len(attempts) < 3:
            raise ConnectionError
        return {"messages": [replaced(state, "on its way")]}

    builder = StateGraph(MessagesState)
    policy = RetryPolicy(max_attempts=3, initial_interval=0.001, jitter=False)
    builder.add_node("flaky", track_edits(flaky, history=history), retry_policy=policy)
    builder.add_edge(START, "flaky")
    builder.compile().invoke(question(), config())
    assert len(attempts) == 3
    assert edits(history) == [("replace_tool_result", "flaky", 1)]
    assert len(history.open("t")) == 2


def parallel(history: GraphHistory, first_delay: threading.Event | None = None) -> Any:
    """Two nodes of one step: `a` appends, `b` refreshes; `a` may have to wait for `b`."""

    def a(state: MessagesState) -> dict[str, Any]:
        if first_delay is not None:
            assert first_delay.wait(10)
        return {"messages": [AIMessage("from a", id="a")]}

    def b(state: MessagesState) -> dict[str, Any]:
        return {"messages": [replaced(state, "on its way"), AIMessage("from b", id="b")]}

    tracked_b = track_edits(b, history=history)

    def b_and_signal(state: MessagesState, config: RunnableConfig) -> Any:
        result = tracked_b(state, config=config)
        if first_delay is not None:
            first_delay.set()
        return result

    builder = StateGraph(MessagesState)
    builder.add_node("a", track_edits(a, history=history))
    builder.add_node("b", b_and_signal)
    for name in "ab":
        builder.add_edge(START, name)
    return builder


@pytest.mark.parametrize("wait", [False, True], ids=["any order", "b before a"])
def test_parallel_nodes_lose_no_update(wait: bool, history: GraphHistory) -> None:
    """The last version is the next state, whichever node was through first."""
    builder = parallel(history, threading.Event() if wait else None)
    final = builder.compile().invoke(question(), config())
    newest = history.log("t")[0]
    assert texts(newest) == [message.text for message in final["messages"]]
    assert texts(newest)[1:] == ["on its way", "from a", "from b"]
    assert ("replace_tool_result", "b", 1) in edits(history)
    added = [author for kind, author, _ in edits(history) if kind in ("append", "insert")]
    assert sorted(added) == ["a", "b"]
    assert set(history.open("t").branches()) == {"main"}


def test_sent_tasks_start_from_the_state_and_not_from_what_is_sent(history: GraphHistory) -> None:
    def fan(state: Fan) -> Any:
        sends = [Send("worker", {"item": item, "messages": []}) for item in "xyz"]
        return Command(goto=sends, update={"messages": [AIMessage("all three")]})

    def worker(state: Fan) -> dict[str, Any]:
        return {"messages": [ToolMessage(state["item"], tool_call_id=state["item"])]}

    builder = StateGraph(Fan)
    builder.add_node("fan", track_edits(fan, history=history), destinations=("worker",))
    builder.add_node("worker", track_edits(worker, history=history))
    builder.add_edge(START, "fan")
    final = builder.compile().invoke(question(), config())
    newest = history.log("t")[0]
    assert texts(newest)[2:] == ["all three", "x", "y", "z"]
    assert texts(newest) == [message.text for message in final["messages"]]
    made = [(kind, author) for kind, author, _ in edits(history)]
    assert made[0] == ("append", "fan")
    assert len(made) == 4 and {author for _, author in made[1:]} == {"worker"}
    assert {kind for kind, _ in made} <= {"append", "insert"}


def test_a_step_that_fails_in_part_goes_on_in_another_process(tmp_path: Path) -> None:
    """What was through is not run again; the rest follows it, on the same branch."""
    saved = threading.Event()
    fails = [True]

    class Signalling(InMemorySaver):
        def put_writes(self, *args: Any, **kwargs: Any) -> None:
            super().put_writes(*args, **kwargs)
            saved.set()

    saver = Signalling()

    def graph(history: GraphHistory) -> Any:
        def good(state: MessagesState) -> dict[str, Any]:
            return {"messages": [replaced(state, "on its way")]}

        def bad(state: MessagesState) -> dict[str, Any]:
            if fails:
                assert saved.wait(10)
                raise ConnectionError
            return {"messages": [AIMessage("done")]}

        builder = StateGraph(MessagesState)
        for node in (good, bad):
            builder.add_node(node.__name__, track_edits(node, history=history))
            builder.add_edge(START, node.__name__)
        return builder.compile(checkpointer=history.saver(saver))

    with pytest.raises(ConnectionError):
        graph(GraphHistory(tmp_path / "h.db")).invoke(question(), config())
    fails.clear()
    history = GraphHistory(tmp_path / "h.db")
    final = graph(history).invoke(None, config())
    assert edits(history) == [("replace_tool_result", "good", 1), ("append", "bad", None)]
    assert texts(history.log("t")[0]) == [message.text for message in final["messages"]]
    assert set(history.open("t").branches()) == {"main"}


def test_a_step_that_is_run_again_after_a_crash_counts_once(history: GraphHistory) -> None:
    """The process ended between our commit and LangGraph's, so that the node runs once more."""
    crashes = [True]
    through = threading.Event()

    class Crashing(InMemorySaver):
        def put_writes(self, *args: Any, **kwargs: Any) -> None:
            through.set()
            if not crashes:
                super().put_writes(*args, **kwargs)

    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [replaced(state, "on its way")]}

    def crash(state: MessagesState) -> None:
        if crashes:
            assert through.wait(10)
            raise ConnectionError

    builder = StateGraph(MessagesState)
    builder.add_node("node", track_edits(node, history=history))
    builder.add_node("crash", crash)
    for name in ("node", "crash"):
        builder.add_edge(START, name)
    graph = builder.compile(checkpointer=history.saver(Crashing()))
    with pytest.raises(ConnectionError):
        graph.invoke(question(), config())
    crashes.clear()
    assert len(history.open("t")) == 2
    graph.invoke(None, config())
    assert edits(history) == [("replace_tool_result", "node", 1)]
    assert len(history.open("t")) == 2


def test_subgraphs_have_their_own_namespace(history: GraphHistory) -> None:
    def inner(state: MessagesState) -> dict[str, Any]:
        return {"messages": [replaced(state, "on its way"), AIMessage("found", id="found")]}

    sub = chain(track_edits(inner, history=history))
    graph = chain(
        track_edits(sub, history=history), names=["research"], checkpointer=InMemorySaver()
    )
    graph.invoke(question(), config())
    outer, own = history.namespaces("t")
    assert outer == "" and own.startswith("research:") and "|" not in own
    expected = [("replace_tool_result", 1), ("append", None)]
    assert edits(history) == [(kind, "research", old) for kind, old in expected]
    assert edits(history, "t", own) == [(kind, "inner", old) for kind, old in expected]
    assert [name for name, _ in graph.get_subgraphs()] == ["research"]  # LangGraph still finds it


def test_a_command_for_the_parent_graph_is_an_edit_there(history: GraphHistory) -> None:
    def hand_over(state: MessagesState) -> Any:
        update = {"messages": [replaced(state, "on its way")]}
        return Command(graph=Command.PARENT, goto="other", update=update)

    sub = chain(track_edits(hand_over, history=history))
    builder = StateGraph(MessagesState)
    builder.add_node("team", track_edits(sub, history=history), destinations=("other",))
    builder.add_node("other", lambda state: None)
    builder.add_edge(START, "team")
    final = builder.compile().invoke(question(), config())
    assert final["messages"][1].content == "on its way"
    assert history.namespaces("t") == ("",)
    assert edits(history) == [("replace_tool_result", "team", 1)]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_threads_of_two_users_never_mix(kind: str, tmp_path: Path) -> None:
    history = GraphHistory(tmp_path / "h.db" if kind == "sqlite" else None)

    def node(state: MessagesState) -> dict[str, Any]:
        who = state["messages"][0].text
        return {"messages": [replaced(state, f"for {who}"), AIMessage(f"to {who}")]}

    graph = chain(track_edits(node, history=history), checkpointer=history.saver(InMemorySaver()))

    def talk(user: int) -> None:
        for turn in range(4):
            first = [
                HumanMessage(f"user {user}", id="who"),
                ToolMessage("?", tool_call_id="c", id="result"),
            ]
            more = [HumanMessage(f"user {user}, turn {turn}")]
            graph.invoke({"messages": more if turn else first}, config(f"user {user}"))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(talk, range(6)))
    for user in range(6):
        versions = history.log(f"user {user}")
        assert set(history.open(f"user {user}").branches()) == {"main"}
        for text in texts(versions[0]):
            assert f"user {user}" in text
        replies = [text for text in texts(versions[0]) if text.startswith("to")]
        assert len(replies) == 4


def test_many_runs_of_one_event_loop(history: GraphHistory) -> None:
    async def node(state: MessagesState) -> dict[str, Any]:
        await asyncio.sleep(0.001)
        return {"messages": [replaced(state, f"for {state['messages'][0].text}")]}

    graph = chain(track_edits(node, history=history), checkpointer=history.saver(InMemorySaver()))

    async def all_of_them() -> None:
        runs = (
            graph.ainvoke(
                {
                    "messages": [
                        HumanMessage(str(user)),
                        ToolMessage("?", tool_call_id="c", id="result"),
                    ]
                },
                config(str(user)),
            )
            for user in range(20)
        )
        await asyncio.gather(*runs)

    asyncio.run(all_of_them())
    for user in range(20):
        assert texts(history.log(str(user))[0]) == [str(user), f"for {user}"]


def test_tasks_sent_from_the_start_know_the_state(history: GraphHistory) -> None:
    """What they are sent is not the state: it was taken for empty, and the question then came into
    the log behind their answers, by nobody."""

    def work(sent: dict[str, str]) -> dict[str, Any]:
        return {"messages": [AIMessage(f"did {sent['job']}", id=sent["job"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("work", track_edits(work, history=history))  # type: ignore[type-var]
    builder.add_conditional_edges(
        START, lambda state: [Send("work", {"job": job}) for job in ("a", "b")], ["work"]
    )
    graph = builder.compile(checkpointer=InMemorySaver())
    graph.invoke({"messages": [HumanMessage("?", id="question")]}, config())
    assert [texts(version) for version in reversed(history.log("t"))] == [
        ["?"],
        ["?", "did a"],
        ["?", "did a", "did b"],
    ]
    assert edits(history) == [("append", "work", None)] * 2


@pytest.mark.parametrize("tells", [True, False], ids=["saver", "bare-saver"])
def test_a_call_that_a_human_changes_before_it_runs_is_an_edit_of_it(
    history: GraphHistory, tells: bool
) -> None:
    """Without the history's saver it was taken for an answer appended in a branch of its own."""

    def pay(amount: int) -> AIMessage:
        call = {"name": "pay", "args": {"amount": amount}, "id": "c"}
        return AIMessage("", id="call", tool_calls=[call])

    def model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [pay(100)]}

    def tools(state: MessagesState) -> dict[str, Any]:
        return {"messages": [ToolMessage("paid", tool_call_id="c", id="result")]}

    builder = StateGraph(MessagesState)
    builder.add_node("model", track_edits(model, history=history))
    builder.add_node("tools", track_edits(tools, history=history))
    builder.add_edge(START, "model")
    builder.add_edge("model", "tools")
    saver: Any = history.saver(InMemorySaver()) if tells else InMemorySaver()
    graph = builder.compile(checkpointer=saver, interrupt_before=["tools"])
    graph.invoke({"messages": [HumanMessage("Pay.", id="question")]}, config())
    graph.update_state(config(), {"messages": [pay(10)]})
    graph.invoke(None, config())
    assert edits(history) == [
        ("append", "model", None),
        ("other", "update_state", 1),
        ("append", "tools", None),
    ]
    calls = history.log("t")[0].messages[1].tool_calls
    assert calls[0].arguments_json == '{"amount": 10}'
