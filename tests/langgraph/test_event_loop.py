"""Tracking in event loops: none hangs, none is blocked, and no store is touched in one."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from patchkv_langgraph import GraphHistory, track_edits

from .graphs import Graph, config, edits, question, texts
from .postgres import postgres_server

SEEDS = int(os.environ.get("PATCHKV_SEEDS", "12"))
"""Random fan-outs per saver."""


def finished(work: Coroutine[Any, Any, Any], seconds: float = 60) -> Any:
    """The result of a coroutine, in an event loop of a thread: one that hangs fails the test."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((True, asyncio.run(work)))
        except BaseException as error:
            result.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert result, f"the event loop hangs after {seconds} s"
    is_right, value = result[0]
    if not is_right:
        raise value
    return value


@asynccontextmanager
async def sqlite_saver(folder: Path) -> AsyncIterator[Any]:
    aio = pytest.importorskip("langgraph.checkpoint.sqlite.aio")
    async with aio.AsyncSqliteSaver.from_conn_string(str(folder / "checkpoints.db")) as saver:
        yield saver


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with postgres_server() as address:
        yield address


@asynccontextmanager
async def postgres_saver(address: str) -> AsyncIterator[Any]:
    aio = pytest.importorskip("langgraph.checkpoint.postgres.aio")
    async with aio.AsyncPostgresSaver.from_conn_string(address) as saver:
        await saver.setup()
        yield saver


def node(name: str, delay_s: float | None, is_async: bool = True) -> Any:
    """Appends a message; a delay of None returns without giving way to the loop."""

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(name, id=f"{name}-{len(state['messages'])}")]}

    async def arun(state: MessagesState) -> dict[str, Any]:
        if delay_s is not None:
            await asyncio.sleep(delay_s)
        return answer(state)

    def run(state: MessagesState) -> dict[str, Any]:
        time.sleep(delay_s or 0)
        return answer(state)

    return arun if is_async else run


def fan(history: GraphHistory, saver: Any, nodes: list[Any]) -> Graph:
    """A graph whose nodes all run side by side."""
    builder = StateGraph(MessagesState)
    for number, each in enumerate(nodes):
        builder.add_node(f"n{number}", track_edits(each, history=history))
        builder.add_edge(START, f"n{number}")
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize("delays", [(None, None), (0, 0), (None, 0.01), (0.001, 0.001)], ids=str)
def test_parallel_nodes_over_an_asynchronous_saver(
    delays: tuple[float | None, ...], tmp_path: Path
) -> None:
    """The loop hung for ever: one node's commit held the lock of its thread and asked the saver,
    which needs the loop, and the loop waited for that lock to begin the other node."""

    async def turns() -> None:
        async with sqlite_saver(tmp_path) as saver:
            history = GraphHistory(tmp_path / "history.db")
            nodes = [node(f"m{i}", delay) for i, delay in enumerate(delays)]
            graph = fan(history, history.saver(saver), nodes)
            for turn in range(5):
                final = await graph.ainvoke({"messages": [HumanMessage(f"q{turn}")]}, config())
            assert texts(history.log("t")[0]) == [each.text for each in final["messages"]]

    finished(turns())


def test_the_version_of_a_state_is_asked_for_in_a_thread_beside_a_tracked_node(
    tmp_path: Path,
) -> None:
    """`asyncio.to_thread(history.version, ...)` held the lock that the loop waited for."""
    seen = []

    async def ask(state: MessagesState, config: RunnableConfig) -> None:
        seen.append(await asyncio.to_thread(history.version, state, config))
        seen.append(await history.aversion(state, config))

    async def turns() -> None:
        async with sqlite_saver(tmp_path) as saver:
            builder = StateGraph(MessagesState)
            builder.add_node("ask", ask)
            builder.add_edge(START, "ask")
            for name in ("a", "b"):
                builder.add_node(name, track_edits(node(name, 0), history=history))
                builder.add_edge(START, name)
            graph = builder.compile(checkpointer=history.saver(saver))
            for turn in range(5):
                await graph.ainvoke({"messages": [HumanMessage(f"q{turn}")]}, config())

    history = GraphHistory(tmp_path / "history.db")
    finished(turns())
    assert [version.messages[-1].text for version in seen[::2]] == [f"q{i}" for i in range(5)]
    assert seen[::2] == seen[1::2]


def test_nothing_in_the_loop_blocks(tmp_path: Path) -> None:
    """`langgraph dev` ends runs that block the loop: a file of histories was opened in it."""
    blockbuster = pytest.importorskip("blockbuster")

    async def refresh(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage("x")]}

    async def turns() -> None:
        async with sqlite_saver(tmp_path) as saver:
            for wrapped in (saver, history.saver(saver)):
                graph = fan(history, wrapped, [refresh, node("b", 0)])
                with blockbuster.blockbuster_ctx():
                    for _ in range(2):
                        await graph.ainvoke(question(), config())

    history = GraphHistory(tmp_path / "history.db")
    finished(turns())
    assert edits(history)


@pytest.mark.parametrize("is_wrapped", [True, False], ids=["wrapped", "plain"])
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_runs_that_save_at_their_end_wait_for_nothing_and_keep_authors(
    is_async: bool, is_wrapped: bool
) -> None:
    """A checkpoint that would come at the end was waited for, 0.25 s each time, and then nobody was
    the author of the input."""
    saver = InMemorySaver()
    history = GraphHistory()
    graph = fan(history, history.saver(saver) if is_wrapped else saver, [node("a", None, is_async)])
    started = time.perf_counter()
    for turn in range(8):
        given = {"messages": [HumanMessage(f"q{turn}")]}
        if is_async:
            asyncio.run(graph.ainvoke(given, config(), durability="exit"))
        else:
            graph.invoke(given, config(), durability="exit")
    assert time.perf_counter() - started < 8 * 0.25
    first, *later = [(kind, author) for kind, author, _ in edits(history)]
    assert first == ("append", "n0")
    inputs = [("append", "input" if is_wrapped else None), ("append", "n0")]
    assert later == inputs * 7
    assert set(history.open("t").branches()) == {"main"}


def random_fan(seed: int, history: GraphHistory, saver: Any) -> tuple[Graph, random.Random]:
    """Tracked nodes side by side, in two steps, each with a random delay."""
    chance = random.Random(seed)

    def made(name: str) -> Any:
        delay = chance.choice([None, 0, 0, 0.001, 0.003])
        return track_edits(node(name, delay, chance.random() < 0.7), history=history)

    builder = StateGraph(MessagesState)
    first = [f"a{i}" for i in range(chance.randint(1, 4))]
    second = [f"b{i}" for i in range(chance.randint(1, 4))]
    for name in (*first, *second):
        builder.add_node(name, made(name))
    for name in first:
        builder.add_edge(START, name)
    for name in second:
        builder.add_edge(first, name)
    return builder.compile(checkpointer=saver), chance


async def random_turns(seeds: range, saver: Any, folder: Path) -> None:
    for seed in seeds:
        history = GraphHistory(folder / f"{seed % 2}.db" if seed % 3 else None)
        is_wrapped = bool(seed % 4)
        graph, chance = random_fan(seed, history, history.saver(saver) if is_wrapped else saver)
        durability: Any = chance.choice(["sync", "async", "exit"])
        where = config(f"seed {seed}")

        async def turn(text: str, graph: Graph = graph, where: Any = where, how: Any = durability):
            return await graph.ainvoke({"messages": [HumanMessage(text)]}, where, durability=how)

        for number in range(3):
            final = await turn(f"q{number}")
            newest = history.log(f"seed {seed}")[0]
            assert texts(newest) == [each.text for each in final["messages"]], seed
        if chance.random() < 0.3:  # runs of one thread side by side
            await asyncio.gather(turn("x"), turn("y"), turn("z"))
        history.store.close()


def test_random_fan_outs_over_sqlite(tmp_path: Path) -> None:
    async def turns() -> None:
        async with sqlite_saver(tmp_path) as saver:
            await random_turns(range(SEEDS), saver, tmp_path)

    finished(turns(), 60 + SEEDS)


def test_random_fan_outs_over_postgres(tmp_path: Path, postgres: str) -> None:
    async def turns() -> None:
        async with postgres_saver(postgres) as saver:
            await random_turns(range(1000, 1000 + SEEDS), saver, tmp_path)

    finished(turns(), 60 + SEEDS)
