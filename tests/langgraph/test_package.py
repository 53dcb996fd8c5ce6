"""What is loaded when, and what tracking costs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState

import patchkv_langgraph
from patchkv_agents.context import MemoryHistoryStore
from patchkv_langgraph import GraphHistory, track_edits
from patchkv_langgraph.snapshots import Snapshots

from .graphs import chain, config, question, replaced


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_it_works_without_langchain_and_loads_no_model_code() -> None:
    run(
        """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("langchain", "torch", "transformers"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
import patchkv_agents, patchkv_langgraph
assert not {"langgraph", "langchain_core"} & set(sys.modules)
from patchkv_langgraph import *
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph

history = GraphHistory()

@track_edits(history=history)
def node(state):
    return {"messages": [AIMessage("yes")]}

graph = StateGraph(MessagesState).add_node(node).add_edge(START, "node").compile()
graph.invoke({"messages": [("user", "?")]}, {"configurable": {"thread_id": "t"}})
assert history.log("t")[0].edits[0].author == "node"
"""
    )


@pytest.mark.parametrize(
    ("missing", "package", "names", "install"),
    [
        ("langgraph", "patchkv_langgraph", ["GraphHistory", "track_edits"], "langgraph"),
        ("langchain_core", "patchkv_langgraph", ["context_tool"], "langgraph"),
        ("langchain_core", "patchkv_langchain", ["ChatPatchKV"], "patchkv-agents[langchain]"),
        ("langchain", "patchkv_langchain", ["PatchKVMiddleware"], "patchkv-agents[langchain]"),
    ],
)
def test_what_is_missing_is_told_with_what_installs_it(
    missing: str, package: str, names: list[str], install: str
) -> None:
    run(
        f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
import {package}
for name in {names}:
    try:
        getattr({package}, name)
    except ImportError as error:
        assert f"{{name}} needs {missing}" in str(error) and {install!r} in str(error), error
    else:
        raise AssertionError(name)
"""
    )


def test_every_public_name_is_there() -> None:
    for name in patchkv_langgraph.__all__:
        assert getattr(patchkv_langgraph, name) is not None
    assert set(patchkv_langgraph.__all__) <= set(dir(patchkv_langgraph))
    with pytest.raises(AttributeError):
        _ = patchkv_langgraph.no_such_name


def long_state(messages: int = 200) -> dict[str, Any]:
    made: list[Any] = []
    for number in range(messages // 2):
        made.append(HumanMessage(f"Question {number}. " * 20, id=f"q{number}"))
        made.append(ToolMessage(f"r {number}. " * 200, tool_call_id=f"c{number}", id=f"r{number}"))
    return {"messages": made}


def test_an_unchanged_message_is_converted_once_and_a_changed_one_again() -> None:
    call = {"name": "f", "args": {"a": 1, "b": 2}, "id": "c"}
    messages = [AIMessage("", tool_calls=[call], id="a"), HumanMessage("x", id="h")]
    snapshots = Snapshots()
    first, _ = snapshots.take(messages)
    copies = [message.model_copy(deep=True) for message in messages]
    assert all(a is b for a, b in zip(first, snapshots.take(copies)[0], strict=True))
    messages[0].tool_calls[0]["args"] = {"a": True, "b": 2}  # equal, for Python
    second, _ = snapshots.take(messages)
    assert second[0] != first[0] and second[1] is first[1]
    messages[0].tool_calls[0]["args"] = {"b": 2, "a": True}  # templates show the order of keys
    assert snapshots.take(messages)[0][0] != second[0]


def test_what_has_to_be_replaced_is_named_by_its_place() -> None:
    broken = HumanMessage("x", id="h")
    broken.content = "\ud800"
    values, (problem,) = Snapshots().take([HumanMessage("a"), broken])
    assert problem.startswith("message 1: ") and "surrogate" in problem
    assert values[1].text == "\ufffd\ufffd\ufffd"


class Counting(MemoryHistoryStore):
    """A store that counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def load(self, *args: Any) -> Any:
        self.calls["load"] += 1
        return super().load(*args)

    def version_ids(self, *args: Any) -> Any:
        self.calls["version_ids"] += 1
        return super().version_ids(*args)

    def branches(self, *args: Any) -> Any:
        self.calls["branches"] += 1
        return super().branches(*args)


@pytest.mark.parametrize("durability", ["async", "exit"])
def test_a_late_step_asks_the_store_as_often_as_an_early_one(durability: Any) -> None:
    """All ids of the versions were listed at each step."""
    store = Counting()
    history = GraphHistory(store)

    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [replaced(state, f"new {len(store.calls)} {time.time_ns()}", 1)]}

    graph = chain(track_edits(node, history=history), checkpointer=history.saver(InMemorySaver()))
    counts = []
    for _ in range(60):
        before = Counter(store.calls)
        state = question() if not counts else {"messages": []}
        graph.invoke(state, config(), durability=durability)
        counts.append(store.calls - before)
    assert len(history.open("t")) == 61
    assert counts[-1] == counts[5] and counts[-1]["version_ids"] == 0


def test_a_file_grows_by_what_changed(tmp_path: Path) -> None:
    """Steps over a state of 240 kB take as much of the file however many came before."""
    path = tmp_path / "history.db"
    saver = InMemorySaver()
    sizes = []

    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [replaced(state, f"new {time.time_ns()}", 101)]}

    for turn in range(3):
        history = GraphHistory(path)
        tracked = track_edits(node, history=history)
        graph = chain(tracked, checkpointer=history.saver(saver))
        for step in range(25):
            is_first = not turn and not step
            graph.invoke(long_state() if is_first else {"messages": []}, config())
        history.store.close()  # which empties the log beside the file
        sizes.append(path.stat().st_size)
    first, second = (after - before for before, after in pairwise(sizes))
    assert second < 1.5 * first and second < 25 * 5_000
