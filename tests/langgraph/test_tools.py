"""Tools that rewrite their earlier results."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, InjectedToolCallId, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, ToolRuntime
from langgraph.types import Command, Send

from patchkv_agents.context import EditKind, from_langchain
from patchkv_agents.errors import ContextError, InputError
from patchkv_langgraph import (
    EditMark,
    GraphHistory,
    TrackingWarning,
    context_tool,
    mark_of,
    marked,
    marked_edits,
    track_edits,
)

from .graphs import Graph, config, edits


@pytest.fixture
def history() -> GraphHistory:
    return GraphHistory()


def call(number: int, name: str = "status", **args: Any) -> AIMessage:
    made = {"name": name, "args": args or {"order": 7}, "id": f"call-{number}"}
    return AIMessage("", tool_calls=[made], id=f"ask-{number}")


def graph_of(history: GraphHistory, *tools: Any) -> Graph:
    builder = StateGraph(MessagesState)
    builder.add_node("tools", track_edits(ToolNode(list(tools)), history=history))
    builder.add_edge(START, "tools")
    return builder.compile(checkpointer=history.saver(InMemorySaver()))


def contents(state: Any) -> list[Any]:
    return [message.content for message in state["messages"] if message.type == "tool"]


def counting() -> Any:
    results = iter(["packed", "sent", "there"])

    def status(order: int) -> str:
        """Where an order is."""
        return next(results)

    return status


def acounting() -> Any:
    function = counting()

    async def status(order: int) -> str:
        """Where an order is."""
        await asyncio.sleep(0)
        result: str = function(order)
        return result

    return status


ANSWER = "The earlier result of this call was brought up to date."


@pytest.mark.parametrize("above", [True, False], ids=["above @tool", "below @tool"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_tool_rewrites_its_earlier_result(above: bool, mode: str, history: GraphHistory) -> None:
    function = counting() if mode == "sync" else acounting()
    made = context_tool(tool(function)) if above else tool(context_tool()(function))
    graph = graph_of(history, made)
    assert set(made.tool_call_schema.model_json_schema()["properties"]) == {"order"}
    state: Any = None
    for number in range(3):
        update: Any = {"messages": [call(number)]}
        if mode == "sync":
            state = graph.invoke(update, config())
        else:
            state = asyncio.run(graph.ainvoke(update, config()))
    assert contents(state) == ["there", ANSWER, ANSWER]
    first = state["messages"][1]
    assert (first.tool_call_id, first.name) == ("call-0", "status")
    replaced = [edit for edit in edits(history) if edit[0] == "replace_tool_result"]
    assert replaced == [("replace_tool_result", "status", 1)] * 2
    newest = history.log("t")[0]
    assert next(e for e in newest.edits if e.old_indices).declared


@pytest.mark.parametrize(
    ("match", "expected"),
    [("arguments", ["packed", "sent"]), ("name", ["sent", ANSWER])],
)
def test_which_calls_are_the_same(match: Any, expected: list[str], history: GraphHistory) -> None:
    graph = graph_of(history, context_tool(tool(counting()), match=match))
    graph.invoke({"messages": [call(0, order=7)]}, config())
    assert contents(graph.invoke({"messages": [call(1, order=8)]}, config())) == expected


@pytest.mark.parametrize(
    "replaces",
    ["evidence", "call-x", lambda state, args: [state["messages"][1].id], lambda s, a: {"call-x"}],
    ids=["id", "tool_call_id", "callable", "callable of call"],
)
def test_a_tool_names_what_it_replaces(replaces: Any, history: GraphHistory) -> None:
    made = context_tool(
        tool(counting()), replaces=replaces, kind="refresh_evidence", author="shop", answer="done"
    )
    start = [
        HumanMessage("?"),
        ToolMessage("old", tool_call_id="call-x", id="evidence"),
        call(0),
    ]
    state = graph_of(history, made).invoke({"messages": start}, config())
    assert contents(state) == ["packed", "done"]
    assert edits(history) == [("refresh_evidence", "shop", 1), ("append", "tools", None)]


def test_nothing_to_replace_is_an_answer_as_always(history: GraphHistory) -> None:
    for replaces in ("nobody", "previous", None):
        graph = graph_of(history, context_tool(tool(counting()), replaces=replaces))
        state = graph.invoke({"messages": [call(0)]}, config(str(replaces)))
        assert contents(state) == ["packed"]
        assert edits(history, str(replaces)) == [("append", "tools", None)]


def test_what_is_injected_stays_injected(history: GraphHistory) -> None:
    seen: list[Any] = []

    @tool
    @context_tool
    def status(
        order: int,
        state: Annotated[Any, InjectedState],
        call_id: Annotated[str, InjectedToolCallId],
        runtime: ToolRuntime,
    ) -> Any:
        """Where an order is."""
        seen.append((len(state["messages"]), call_id, runtime.tool_call_id))
        return {"order": order, "is": ["packed", len(seen)]}

    graph = graph_of(history, status)
    graph.invoke({"messages": [call(0)]}, config())
    state = graph.invoke({"messages": [call(1)]}, config())
    assert seen == [(1, "call-0", "call-0"), (3, "call-1", "call-1")]
    assert contents(state) == ['{"order": 7, "is": ["packed", 2]}', ANSWER]


def test_content_and_artifact(history: GraphHistory) -> None:
    results = iter([("packed", [1]), ("sent", [2])])

    @context_tool
    @tool(response_format="content_and_artifact")
    def status(order: int) -> Any:
        """Where an order is."""
        return next(results)

    graph = graph_of(history, status)
    graph.invoke({"messages": [call(0)]}, config())
    state = graph.invoke({"messages": [call(1)]}, config())
    assert contents(state) == ["sent", ANSWER]
    assert state["messages"][1].artifact == [2]


def test_commands_of_the_tool_itself_are_marked(history: GraphHistory) -> None:
    @context_tool(kind=EditKind.REVISE_PLAN)
    @tool
    def revise(plan: str, runtime: ToolRuntime) -> Command[Any]:
        """Change the plan."""
        update = [
            HumanMessage(plan, id="plan"),
            ToolMessage("revised", tool_call_id=runtime.tool_call_id),
        ]
        return Command(update={"messages": update})

    start = [HumanMessage("first this", id="plan"), call(0, "revise", plan="first that")]
    state = graph_of(history, revise).invoke({"messages": start}, config())
    assert state["messages"][0].content == "first that"
    assert edits(history) == [("revise_plan", "revise", 0), ("append", "tools", None)]


def test_several_calls_of_one_message(history: GraphHistory) -> None:
    graph = graph_of(history, context_tool(tool(counting())), tool(counting()))
    made = [{"name": "status", "args": {"order": order}, "id": f"c{order}"} for order in (1, 2)]
    state = graph.invoke({"messages": [AIMessage("", tool_calls=made)]}, config())
    assert sorted(contents(state)) == ["packed", "sent"]


def test_calls_that_are_sent_with_their_state(history: GraphHistory) -> None:
    """As agents do: one task for each call, with the state beside it."""

    def fan(state: MessagesState) -> Command[Any]:
        sends = [
            Send("tools", {"__type": "tool_call_with_context", "tool_call": each, "state": state})
            for each in state["messages"][-1].tool_calls
        ]
        return Command(goto=sends)

    builder = StateGraph(MessagesState)
    builder.add_node("fan", fan, destinations=("tools",))
    node = ToolNode([context_tool(tool(counting()))])
    builder.add_node("tools", track_edits(node, history=history))
    builder.add_edge(START, "fan")
    made = [
        {"name": "status", "args": {"order": order}, "id": f"c{order}", "type": "tool_call"}
        for order in (7, 8)
    ]
    start = [
        call(0),
        ToolMessage("old", tool_call_id="call-0", id="old"),
        AIMessage("", tool_calls=made),
    ]
    state = builder.compile().invoke({"messages": start}, config())
    assert contents(state)[0] in ("packed", "sent") and len(contents(state)) == 3
    assert ("replace_tool_result", "status", 1) in edits(history)
    assert [m.text for m in history.log("t")[0].messages] == [
        message.text for message in state["messages"]
    ]


def test_a_node_input_of_nothing_but_messages() -> None:
    node = ToolNode([context_tool(tool(counting()))])
    builder: Any = StateGraph(MessagesState)
    results = []

    def run(state: MessagesState, config: RunnableConfig) -> None:
        results.extend(node.invoke(state["messages"], config))

    builder.add_node("run", run)
    builder.add_edge(START, "run")
    earlier = [call(0), ToolMessage("old", tool_call_id="call-0", id="old")]
    builder.compile().invoke({"messages": [*earlier, call(1)]})
    (command,) = results
    assert [message.content for message in command.update] == ["packed", ANSWER]


def test_called_by_hand_a_tool_is_the_tool() -> None:
    made = context_tool(tool(counting()))
    assert isinstance(made, BaseTool)
    assert made.invoke({"order": 7}) == "packed"
    assert context_tool(counting())(7) == "packed"


def test_a_tool_that_fails_answers_with_its_error(history: GraphHistory) -> None:
    @context_tool
    @tool
    def status(order: int) -> str:
        """Where an order is."""
        raise ConnectionError

    builder = StateGraph(MessagesState)
    node = ToolNode([status], handle_tool_errors="not now")
    builder.add_node("tools", track_edits(node, history=history))
    builder.add_edge(START, "tools")
    start = [call(0), ToolMessage("old", tool_call_id="call-0", id="old"), call(1)]
    state = builder.compile().invoke({"messages": start}, config())
    assert contents(state) == ["old", "not now"]


def test_what_cannot_be_decorated() -> None:
    with pytest.raises(InputError, match="function"):
        context_tool(3)
    with pytest.raises(ContextError, match="no kind"):
        context_tool(kind="improve")


def test_marks_change_nothing_that_a_model_is_shown() -> None:
    plain = ToolMessage("new", tool_call_id="c", id="m")
    with_mark = marked(plain, EditMark(EditKind.REFRESH_EVIDENCE, "shop", "k"))
    assert mark_of(plain) is None
    assert mark_of(with_mark) == EditMark(EditKind.REFRESH_EVIDENCE, "shop", "k")
    (one,), (other,) = from_langchain([plain]), from_langchain([with_mark])
    assert one.content_hash == other.content_hash
    assert from_langchain([plain], keep="shown") == from_langchain([with_mark], keep="shown")


def test_a_mark_tells_of_one_edit_only() -> None:
    old = ToolMessage("old", tool_call_id="c", id="m")
    new = marked(ToolMessage("new", tool_call_id="c", id="m"), EditMark(EditKind.REDACT, None, "k"))
    (edit,) = marked_edits([old], [new], author="node")
    assert (edit.kind, edit.author, edit.message_ids) == (EditKind.REDACT, "node", ("m",))
    assert marked_edits([new], [new.model_copy(update={"content": "newer"})]) == ()
    assert marked_edits([], [new]) == ()
    unknown = new.model_copy(update={"response_metadata": {"patchkv_edit": {"kind": "improve"}}})
    assert mark_of(unknown) is None


def board(**options: Any) -> BaseTool:
    @context_tool(**options)
    @tool
    def board(station: str) -> str:
        """The board of a station."""
        return f"board of {station}"

    return board


def calls(turn: int, *stations: str, names: tuple[str, ...] = ()) -> AIMessage:
    names = names or ("board",) * len(stations)
    made = [
        {"name": name, "args": {"station": station}, "id": f"c{turn}{number}"}
        for number, (name, station) in enumerate(zip(names, stations, strict=True))
    ]
    return AIMessage("", tool_calls=made, id=f"a{turn}")


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("options", "first", "second", "expected"),
    [
        ({"match": "name"}, ("York", "Leeds"), ("Bath", "Hull"), {"Bath", "Hull"}),
        ({"match": "name"}, ("York",), ("Bath", "Hull"), {"Bath", "Hull"}),
        ({"replaces": "c00"}, ("York", "Leeds"), ("Bath", "Hull"), {"Bath", "Hull", "Leeds"}),
        ({"replaces": lambda state, args: ["c00"]}, ("York",), ("Bath", "Hull"), {"Bath", "Hull"}),
        ({}, ("York", "Leeds"), ("Leeds", "York"), {"York", "Leeds"}),
        ({}, ("York",), ("York", "York"), {"York"}),
    ],
)
def test_calls_side_by_side_do_not_replace_one_message(
    options: Any, first: Any, second: Any, expected: set[str], mode: str, history: GraphHistory
) -> None:
    """Both results went into the same earlier message, and the last one won."""
    graph = graph_of(history, board(**options))
    graph.invoke({"messages": [calls(0, *first)]}, config())
    given: Any = {"messages": [calls(1, *second)]}
    if mode == "sync":
        state = graph.invoke(given, config())
    else:
        state = asyncio.run(graph.ainvoke(given, config()))
    shown = [content for content in contents(state) if content != ANSWER]
    assert set(shown) == {f"board of {station}" for station in expected}
    assert len(contents(state)) == len(first) + len(second)
    replaced = [index for kind, _, index in edits(history) if kind == "replace_tool_result"]
    assert len(replaced) == len(set(replaced))


def test_two_tools_do_not_replace_one_message(history: GraphHistory) -> None:
    @context_tool(replaces="c00")
    @tool
    async def map(station: str) -> str:
        """The map of a station."""
        return f"map of {station}"

    graph = graph_of(history, board(replaces="c00"), map)
    both = calls(1, "Bath", "Hull", names=("map", "board"))
    asyncio.run(graph.ainvoke({"messages": [calls(0, "York")]}, config()))
    state = asyncio.run(graph.ainvoke({"messages": [both]}, config()))
    assert contents(state) == ["map of Bath", ANSWER, "board of Hull"]


@pytest.mark.parametrize("raises", [True, False])
def test_an_error_neither_replaces_nor_is_replaced(raises: bool, history: GraphHistory) -> None:
    """Later results went into the error's message, and the stale result stayed for good."""
    results = iter(["packed", "down", "sent", "there"])

    @context_tool
    @tool
    def status(order: int, runtime: ToolRuntime) -> Any:
        """Where an order is."""
        result = next(results)
        if result != "down":
            return result
        if raises:
            raise ConnectionError
        return ToolMessage("down", tool_call_id=runtime.tool_call_id or "", status="error")

    builder = StateGraph(MessagesState)
    node = ToolNode([status], handle_tool_errors="down")
    builder.add_node("tools", track_edits(node, history=history))
    builder.add_edge(START, "tools")
    graph = builder.compile(checkpointer=history.saver(InMemorySaver()))
    state: Any = None
    for number in range(4):
        state = graph.invoke({"messages": [call(number)]}, config())
    assert contents(state) == ["there", "down", ANSWER, ANSWER]


def test_a_function_that_fails_costs_no_result(history: GraphHistory) -> None:
    """A tool had run, with its effects, and the model was shown the error of `replaces` instead of
    the result, so that it ran again."""

    def failing(state: Any, arguments: Any) -> list[str]:
        raise LookupError("no such order")

    graph = graph_of(history, context_tool(tool(counting()), replaces=failing))
    with pytest.warns(TrackingWarning, match="no such order"):
        state = graph.invoke({"messages": [call(0)]}, config())
    assert [state["messages"][-1].content, state["messages"][-1].status] == ["packed", "success"]


@pytest.mark.parametrize("named", ["call-0", None])
def test_a_function_may_return_one_id_or_none(named: str | None, history: GraphHistory) -> None:
    """An id was taken for a list of characters, and None for an error of the tool."""
    graph = graph_of(
        history, context_tool(tool(counting()), replaces=lambda state, arguments: named)
    )
    graph.invoke({"messages": [call(0)]}, config())
    state = graph.invoke({"messages": [call(1)]}, config())
    first, last = (m.content for m in state["messages"] if isinstance(m, ToolMessage))
    assert (first, last == "sent") == (("sent", False) if named else ("packed", True))


@pytest.mark.parametrize("wrong", [{"match": "nam"}, {"replaces": 5}])
def test_arguments_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    """`match="nam"` silently meant equal arguments."""
    with pytest.raises(InputError, match=next(iter(wrong))):
        context_tool(tool(counting()), **wrong)
