"""A tracked graph does what the same graph does without tracking, and its history is right."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from patchkv_langgraph import GraphHistory

from .graphs import texts
from .random_graphs import GraphSpec, Runner

SEEDS = int(os.environ.get("PATCHKV_SEEDS", "60"))
FIRST_SEED = int(os.environ.get("PATCHKV_FIRST_SEED", "0"))


def compared(seed: int, folder: Path) -> None:
    """Run the graph of a seed with and without tracking, and compare everything that is seen."""
    spec = GraphSpec.of(seed)
    history = GraphHistory(folder / "history.db" if seed % 4 == 0 else None)
    bare, tracked = _run(spec, None, folder), _run(spec, history, folder)
    assert tracked.outcomes == bare.outcomes
    assert tracked.calls == bare.calls
    if not all(spec.is_tracked.values()) or not history.log(tracked.thread):
        return
    newest = history.log(tracked.thread)[0]
    if tracked.is_through:
        assert texts(newest) == [message.text for message in tracked.messages]
        assert [message.id for message in newest.messages] == [m.id for m in tracked.messages]
    history.store.close()


def _run(spec: GraphSpec, history: GraphHistory | None, folder: Path) -> Runner:
    is_wrapped = history is not None and spec.seed % 5 != 0
    name = "bare" if history is None else "tracked"

    def wrapped(saver: Any) -> Any:
        return history.saver(saver) if is_wrapped and history is not None else saver

    if spec.seed % 3:
        runner = Runner(spec, wrapped(InMemorySaver()), history)
        asyncio.run(runner.arun()) if spec.is_async else runner.run()
        return runner
    path = str(folder / f"{name}.db")
    if not spec.is_async:
        sqlite = pytest.importorskip("langgraph.checkpoint.sqlite")
        with sqlite.SqliteSaver.from_conn_string(path) as saver:
            runner = Runner(spec, wrapped(saver), history)
            runner.run()
        return runner

    async def turns() -> Runner:
        aio = pytest.importorskip("langgraph.checkpoint.sqlite.aio")
        async with aio.AsyncSqliteSaver.from_conn_string(path) as saver:
            runner = Runner(spec, wrapped(saver), history)
            await runner.arun()
        return runner

    return asyncio.run(turns())


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SEEDS))
def test_a_random_graph_runs_as_without_tracking(seed: int, tmp_path: Path) -> None:
    compared(seed, tmp_path)
