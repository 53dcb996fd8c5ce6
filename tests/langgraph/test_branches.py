"""Time travel, forks and `update_state` get their own branch; deleting and copying is mirrored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState

from patchkv_agents.errors import HistoryStoreError
from patchkv_langgraph import GraphHistory, track_edits

from .graphs import Graph, chain, config, edits, question, replaced, texts


@pytest.fixture(params=["memory", "sqlite"])
def checkpointer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "memory":
        yield InMemorySaver()
        return
    sqlite = pytest.importorskip("langgraph.checkpoint.sqlite")
    with sqlite.SqliteSaver.from_conn_string(str(tmp_path / "checkpoints.db")) as saver:
        yield saver


@pytest.fixture
def history() -> GraphHistory:
    return GraphHistory()


def agent(history: GraphHistory, checkpointer: BaseCheckpointSaver[Any]) -> Graph:
    """Refreshes the tool result by counting, then answers with it."""

    def refresh(state: MessagesState) -> dict[str, Any]:
        seen = state["messages"][1].text
        return {"messages": [replaced(state, f"{seen}, and then")]}

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(f"It was {state['messages'][1].text}.")]}

    return chain(
        track_edits(refresh, history=history),
        track_edits(answer, history=history),
        checkpointer=checkpointer,
    )


def at(graph: Graph, node: str, *, newest: bool = True) -> Any:
    """The config of a checkpoint from which `node` is to run."""
    found = [s.config for s in graph.get_state_history(config()) if s.next == (node,)]
    return found[0 if newest else -1]


def same_as_state(history: GraphHistory, graph: Graph) -> None:
    state = graph.get_state(config()).values["messages"]
    newest = history.log("t")[0]
    assert texts(newest) == [message.text for message in state]
    assert [message.id for message in newest.messages] == [message.id for message in state]


@pytest.mark.parametrize("tracked", [True, False], ids=["tracked saver", "plain saver"])
def test_runs_that_follow_each_other_are_one_branch(
    tracked: bool, history: GraphHistory, checkpointer: Any
) -> None:
    graph = agent(history, history.saver(checkpointer) if tracked else checkpointer)
    graph.invoke(question(), config())
    graph.invoke({"messages": [HumanMessage("And now?")]}, config())
    assert set(history.open("t").branches()) == {"main"}
    turn = [("replace_tool_result", "refresh", 1), ("append", "answer", None)]
    assert edits(history) == [*turn, ("append", "input" if tracked else None, None), *turn]
    same_as_state(history, graph)


@pytest.mark.parametrize("tracked", [True, False], ids=["tracked saver", "plain saver"])
def test_time_travel_begins_a_branch_where_the_old_run_was(
    tracked: bool, history: GraphHistory, checkpointer: Any
) -> None:
    graph = agent(history, history.saver(checkpointer) if tracked else checkpointer)
    graph.invoke(question(), config())
    first_run = history.log("t")
    graph.invoke({"messages": [HumanMessage("And now?")]}, config())
    main = history.log("t")

    ends = [s for s in graph.get_state_history(config()) if s.next == ()]
    graph.invoke({"messages": [HumanMessage("Thank you.")]}, ends[-1].config)
    other = history.log("t")
    assert other[-3:] == first_run and not {v.id for v in other[:-3]} & {v.id for v in main}
    assert set(history.open("t").branches()) == {"main", "main-2"}
    assert history.open("t").branches()["main"] == main[0].id
    same_as_state(history, graph)


def test_a_node_that_runs_again_from_an_old_checkpoint(
    history: GraphHistory, checkpointer: Any
) -> None:
    """Going back needs no new version where the same thing happens again."""
    answers = iter(["one", "two", "two"])

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(next(answers), id="answer")]}

    graph = chain(track_edits(answer, history=history), checkpointer=history.saver(checkpointer))
    graph.invoke(question(), config())
    graph.invoke(None, at(graph, "answer"))
    graph.invoke(None, at(graph, "answer", newest=False))
    branches = history.open("t").branches()
    assert {texts(history.open("t").get(name))[-1] for name in branches} == {"one", "two"}
    assert len(history.open("t")) == 3  # the question, and two answers to it
    same_as_state(history, graph)


@pytest.mark.parametrize("tracked", [True, False], ids=["tracked saver", "plain saver"])
def test_update_state_of_an_old_checkpoint_forks(
    tracked: bool, history: GraphHistory, checkpointer: Any
) -> None:
    graph = agent(history, history.saver(checkpointer) if tracked else checkpointer)
    graph.invoke(question(), config())
    main = history.log("t")
    old = at(graph, "answer")
    state = graph.get_state(old).values
    fork = graph.update_state(old, {"messages": [replaced(state, "lost")]})
    graph.invoke(None, fork)
    newest, changed, *rest = history.log("t")
    assert texts(newest)[1:] == ["lost", "It was lost."]
    assert rest == list(main[1:])  # from the version that `answer` started from
    (edit,) = changed.edits
    assert (str(edit.kind), edit.author) == ("replace_tool_result", "update_state")
    assert history.open("t").branches()["main"] == main[0].id
    same_as_state(history, graph)


def test_checkpoints_tell_a_fork_from_messages_that_were_removed(checkpointer: Any) -> None:
    """Both lead to the same messages; only with the tracked saver is it certain which it was."""
    history = GraphHistory()
    graph = agent(history, history.saver(checkpointer))
    graph.invoke(question(), config())
    main = history.log("t")
    answer = graph.get_state(config()).values["messages"][-1]
    later = graph.update_state(config(), {"messages": [RemoveMessage(id=answer.id)]})
    graph.invoke({"messages": [HumanMessage("Again?")]}, later)
    assert history.log("t")[-3:] == main
    assert set(history.open("t").branches()) == {"main"}


def test_asynchronous_runs_and_savers(history: GraphHistory, tmp_path: Path) -> None:
    aio = pytest.importorskip("langgraph.checkpoint.sqlite.aio")

    async def run() -> None:
        async with aio.AsyncSqliteSaver.from_conn_string(str(tmp_path / "c.db")) as saver:
            graph = agent(history, history.saver(saver))
            await graph.ainvoke(question(), config())
            old = [s async for s in graph.aget_state_history(config()) if s.next == ("answer",)]
            values = old[0].values
            fork = await graph.aupdate_state(
                old[0].config, {"messages": [replaced(values, "lost")]}
            )
            await graph.ainvoke(None, fork)
            assert set(history.open("t").branches()) == {"main", "main-2"}
            assert texts(history.log("t")[0])[1:] == ["lost", "It was lost."]
            await graph.checkpointer.adelete_thread("t")
            assert await graph.aget_state(config()) and history.log("t") == ()

    asyncio.run(run())


def test_another_process_goes_on_where_one_ended(tmp_path: Path) -> None:
    sqlite = pytest.importorskip("langgraph.checkpoint.sqlite")
    for turn in range(3):
        history = GraphHistory(tmp_path / "history.db")
        with sqlite.SqliteSaver.from_conn_string(str(tmp_path / "checkpoints.db")) as saver:
            graph = agent(history, history.saver(saver))
            graph.invoke({"messages": [HumanMessage("More?")]} if turn else question(), config())
            same_as_state(history, graph)
    assert set(history.open("t").branches()) == {"main"}
    assert [author for _, author, _ in edits(history)] == [
        "refresh",
        "answer",
        *["input", "refresh", "answer"] * 2,
    ]


def test_deleting_a_thread_deletes_its_versions(history: GraphHistory, checkpointer: Any) -> None:
    saver = history.saver(checkpointer)
    graph = agent(history, saver)
    for thread in ("t", "u"):
        graph.invoke(question(), config(thread))
    saver.delete_thread("t")
    assert history.log("t") == () and history.namespaces("t") == ()
    assert graph.get_state(config()).values == {}
    assert len(history.log("u")) == 3
    graph.invoke(question(), config())  # and a new one of that name starts anew
    assert len(history.log("t")) == 3


def test_a_thread_that_another_process_deleted_starts_anew(tmp_path: Path) -> None:
    history = GraphHistory(tmp_path / "history.db")
    graph = agent(history, history.saver(InMemorySaver()))
    graph.invoke(question(), config())
    GraphHistory(tmp_path / "history.db").delete_thread("t")
    graph.invoke({"messages": [HumanMessage("And now?")]}, config())
    assert len(history.log("t")) == 3
    same_as_state(history, graph)


def test_the_checkpointers_own_file_is_refused(tmp_path: Path) -> None:
    """Forgetting rebuilds the file and empties its log, which are not ours then."""
    sqlite = pytest.importorskip("langgraph.checkpoint.sqlite")
    with sqlite.SqliteSaver.from_conn_string(str(tmp_path / "checkpoints.db")) as saver:
        agent(GraphHistory(), saver).invoke(question(), config())
    with pytest.raises(HistoryStoreError, match="another program's"):
        GraphHistory(tmp_path / "checkpoints.db")


def test_copying_a_thread_copies_its_versions() -> None:
    class Copying(InMemorySaver):
        def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
            source = {"configurable": {"thread_id": source_thread_id, "checkpoint_ns": ""}}
            target = {"configurable": {"thread_id": target_thread_id, "checkpoint_ns": ""}}
            for found in reversed(list(self.list(source))):
                parent = found.parent_config
                at = parent and parent["configurable"]["checkpoint_id"]
                where = {**target["configurable"], **({"checkpoint_id": at} if at else {})}
                self.put(
                    {"configurable": where},
                    found.checkpoint,
                    found.metadata,
                    found.checkpoint["channel_versions"],
                )

    history = GraphHistory()
    saver = history.saver(Copying())
    graph = agent(history, saver)
    graph.invoke(question(), config())
    saver.copy_thread("t", "copy")
    assert history.log("copy") == history.log("t")
    graph.invoke({"messages": [HumanMessage("And now?")]}, config("copy"))
    assert len(history.log("copy")) == 6 and len(history.log("t")) == 3
    assert set(history.open("copy").branches()) == {"main"}
    with pytest.raises(HistoryStoreError, match="already"):
        history.copy_thread("t", "copy")


def test_a_saver_that_cannot_copy_copies_nothing(history: GraphHistory) -> None:
    saver = history.saver(InMemorySaver())
    agent(history, saver).invoke(question(), config())
    with pytest.raises(NotImplementedError):
        saver.copy_thread("t", "copy")
    assert history.log("copy") == ()


def test_a_run_goes_on_from_the_branch_whose_answer_it_has(
    history: GraphHistory, checkpointer: Any
) -> None:
    """A step that was run again has made two versions: the state tells which of them goes on."""
    answers = iter(["one", "two", "three"])

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(next(answers))]}

    graph = chain(track_edits(answer, history=history), checkpointer=history.saver(checkpointer))
    graph.invoke(question(), config())
    first = graph.get_state(config()).config
    graph.invoke(None, at(graph, "answer"))
    graph.invoke({"messages": [HumanMessage("And now?")]}, first)
    assert texts(history.log("t")[0])[2:] == ["one", "And now?", "three"]
    assert [str(e.kind) for v in history.log("t") for e in v.edits] == ["append"] * 3
