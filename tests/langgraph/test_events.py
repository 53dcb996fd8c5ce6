"""Edits of nodes where people look for them: events, LangSmith, OpenTelemetry."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import MagicMock

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.tracers import LangChainTracer
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState

from patchkv_langgraph import GraphHistory, track_edits

from .graphs import chain, config, question, replaced


def refresh(state: MessagesState) -> dict[str, Any]:
    return {"messages": [replaced(state, "on its way")]}


async def arefresh(state: MessagesState) -> dict[str, Any]:
    return refresh(state)


def graph_of(node: Any, history: GraphHistory) -> Any:
    saver = history.saver(InMemorySaver())
    return chain(track_edits(node, history=history), names=["refresh"], checkpointer=saver)


class Listening(BaseCallbackHandler):
    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        self.events.append((name, data))


class AsyncListening(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    async def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        self.events.append((name, data))


@pytest.mark.parametrize("mode", ["sync", "async", "sync node in an asynchronous run"])
def test_each_edit_of_a_node_is_an_event(mode: str) -> None:
    history = GraphHistory()
    listening: Any = Listening() if mode == "sync" else AsyncListening()
    graph = graph_of(arefresh if mode == "async" else refresh, history)
    where = {**config(), "callbacks": [listening]}
    if mode == "sync":
        graph.invoke(question(), where)
    else:
        asyncio.run(graph.ainvoke(question(), where))
    newest = history.log("t")[0]
    ((name, data),) = listening.events
    assert name == "patchkv_edit"
    assert (data["version"], data["id"]) == (newest.id, newest.edits[0].id)
    assert (data["kind"], data["author"], data["key"]) == (
        "replace_tool_result",
        "refresh",
        "messages",
    )
    assert "on its way" not in repr(data)


def test_event_streams_have_the_edits() -> None:
    graph = graph_of(arefresh, GraphHistory())

    async def kinds() -> list[str]:
        return [
            event["data"]["kind"]
            async for event in graph.astream_events(question(), config(), version="v2")
            if event["event"] == "on_custom_event" and event["name"] == "patchkv_edit"
        ]

    assert asyncio.run(kinds()) == ["replace_tool_result"]


def test_langsmith_shows_the_edits_of_a_nodes_run() -> None:
    client = MagicMock()
    where = {**config(), "callbacks": [LangChainTracer(client=client)]}
    graph_of(refresh, GraphHistory()).invoke(question(), where)
    sent = [call.kwargs for call in client.update_run.call_args_list]
    shown = [each["extra"]["metadata"].get("patchkv_edits") for each in sent]
    (edits,) = next(each for each in shown if each)
    assert (edits["kind"], edits["author"]) == ("replace_tool_result", "refresh")


def test_opentelemetry_has_the_edits_as_events_of_the_active_span() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("test").start_as_current_span("agent"):
        graph_of(refresh, GraphHistory()).invoke(question(), config())
    (event,) = exporter.get_finished_spans()[0].events
    assert event.name == "patchkv_edit"
    assert event.attributes is not None and event.attributes["kind"] == "replace_tool_result"
