"""deepagents and langmem, where they are installed, against the adapters for their records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver

from patchkv_agents import ContextHistory
from patchkv_agents.context import from_langchain
from patchkv_langchain.middleware import PatchKVMiddleware
from patchkv_langchain.records import declared_edits
from tests.langchain.agents import look, looking, middle_edits, saying

THREAD: Any = {"configurable": {"thread_id": "t"}}
LONG = "a long line of text about clocks\n" * 200


def test_deepagents_summaries(tmp_path: Path) -> None:
    summarization = pytest.importorskip("deepagents.middleware.summarization")
    backends = pytest.importorskip("deepagents.backends")
    others = [
        summarization.SummarizationMiddleware(
            saying(f"Summary {number}." for number in range(5)),
            backend=backends.FilesystemBackend(root_dir=tmp_path, virtual_mode=True),
            trigger=("messages", 6),
            keep=("messages", 2),
        )
    ]
    for watched in (True, False):
        patchkv = PatchKVMiddleware()
        middleware = patchkv.instrument(others) if watched else [*others, patchkv]
        runner = create_agent(
            saying(looking(4)), [look], middleware=middleware, checkpointer=InMemorySaver()
        )
        runner.invoke({"messages": [HumanMessage("Go.")]}, THREAD)
        edits = middle_edits(patchkv.history_of("t"))
        assert edits and set(edits) == {("summarize", "SummarizationMiddleware", "request")}


def test_deepagents_truncated_arguments() -> None:
    summarization = pytest.importorskip("deepagents.middleware.summarization")
    backends = pytest.importorskip("deepagents.backends")
    from langchain.tools import tool

    @tool
    def write_file(path: str, content: str) -> str:
        """Write a file."""
        return f"{path} is written"

    def writing() -> Any:
        for number in range(3):
            arguments = {"path": f"{number}.md", "content": f"{number} {LONG}"}
            call = {"id": f"c{number}", "name": "write_file", "args": arguments}
            yield AIMessage("", tool_calls=[call])
        yield AIMessage("done")

    truncating = summarization.SummarizationMiddleware(
        saying([]),
        backend=backends.StateBackend(),
        truncate_args_settings={
            "trigger": ("messages", 4),
            "keep": ("messages", 2),
            "max_length": 100,
        },
    )
    patchkv = PatchKVMiddleware()
    runner = create_agent(
        saying(writing()),
        [write_file],
        middleware=[truncating, patchkv],
        checkpointer=InMemorySaver(),
    )
    runner.invoke({"messages": [HumanMessage("Go.")]}, THREAD)
    edits = middle_edits(patchkv.history_of("t"))
    assert edits and set(edits) == {("delete", "SummarizationMiddleware", "request")}


def test_deepagents_evicted_messages() -> None:
    filesystem = pytest.importorskip("deepagents.middleware.filesystem")
    before: list[BaseMessage] = [HumanMessage(LONG, id="m0"), AIMessage("Yes.", id="m1")]
    tagged = HumanMessage(LONG, id="m0", additional_kwargs={"lc_evicted_to": "/m0.md"})
    evicted = filesystem._build_truncated_human_message(tagged, "/m0.md")
    history = ContextHistory()
    history.commit(from_langchain(before, keep="shown"))
    after = [evicted, before[1]]
    edits = declared_edits(history.head.messages, after)
    (edit,) = history.commit(from_langchain(after, keep="shown"), edits=edits).edits
    assert (edit.kind.value, edit.author) == ("delete", "FilesystemMiddleware")
    assert edit.partial and not edit.corrected
    assert declared_edits(from_langchain([tagged, before[1]]), [tagged, before[1]]) == ()


def test_langmem_summaries() -> None:
    short_term = pytest.importorskip("langmem.short_term")
    from langchain_core.messages.utils import count_tokens_approximately

    node = short_term.SummarizationNode(
        model=saying(["The visitor saw the clocks."]),
        max_tokens=300,
        max_tokens_before_summary=200,
        max_summary_tokens=50,
        token_counter=count_tokens_approximately,
    )
    messages: list[BaseMessage] = [
        HumanMessage(f"Message {number} about the clocks. " * 10, id=f"m{number}")
        for number in range(6)
    ]
    history = ContextHistory()
    history.commit(from_langchain(messages[:3], keep="shown"))
    shown = node.invoke({"messages": messages, "context": {}})["summarized_messages"]
    assert shown[0].type == "system"
    edits = declared_edits(history.head.messages, shown)
    version = history.commit(from_langchain(shown, keep="shown"), edits=edits)
    (summary, *rest) = version.edits
    assert (summary.kind.value, summary.author) == ("summarize", "SummarizationNode")
    assert summary.old_indices == (0, 1, 2) and 0 in summary.new_indices
    assert not summary.corrected
    assert {edit.kind.value for edit in rest} <= {"append"}
