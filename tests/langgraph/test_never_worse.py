"""A tracked graph runs as the same graph without tracking, whatever its state holds."""

from __future__ import annotations

import operator
import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage, ChatMessage, HumanMessage, ToolMessage
from langchain_core.messages import RemoveMessage as Remove
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from typing_extensions import TypedDict

from patchkv_agents.context import SQLiteHistoryStore
from patchkv_agents.errors import ContextError, HistoryStoreError, InputError
from patchkv_langgraph import GraphHistory, StatePart, TrackingWarning, track_edits

from .graphs import chain, config, edits, question, texts


@pytest.fixture
def history() -> GraphHistory:
    return GraphHistory()


def graph_of(node: Any, state: Any = MessagesState, saver: Any = None) -> Any:
    builder = StateGraph(state)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    return builder.compile(checkpointer=saver or InMemorySaver())


def said(messages: list[Any]) -> list[Any]:
    return [(m.type, m.content, m.id) if hasattr(m, "type") else m for m in messages]


def call(name: str, **arguments: Any) -> AIMessage:
    return AIMessage("", id="a", tool_calls=[{"name": name, "args": arguments, "id": "c"}])


ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "half an emoji": (
        lambda: ToolMessage("bold \ud835", tool_call_id="c", id="r"),
        "bold \ufffd\ufffd\ufffd",
    ),
    "an id of half an emoji": (lambda: AIMessage("x", id="\ud835"), "x"),
    "an argument that is infinite": (lambda: call("wait", seconds=float("inf")), ""),
    "a number that is none": (
        lambda: ToolMessage(
            [{"type": "text", "text": "x", "score": float("nan")}], tool_call_id="c"
        ),
        "x",
    ),
    "a set": (
        lambda: AIMessage([{"type": "text", "text": "x", "tags": {1, 2}}], id="s"),
        "x",
    ),
    "a call without a name": (lambda: call(""), ""),
    "a role of its own": (lambda: ChatMessage(role="critic", content="meh", id="c"), "meh"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_no_history_can_store_is_replaced_there_alone(
    name: str, history: GraphHistory
) -> None:
    """The node was through, with its effects, and then the run died of the commit; and each later
    run of the thread, since its state held the message."""
    make, recorded = ODD[name]
    runs = []

    def node(state: MessagesState) -> dict[str, Any]:
        runs.append(1)
        return {"messages": [make()]}

    given = {"messages": [HumanMessage("a", id="u")]}
    bare = graph_of(node).invoke(given, config())["messages"]
    tracked_node = track_edits(node, history=history)
    graph = graph_of(tracked_node, saver=history.saver(InMemorySaver()))
    with pytest.warns(TrackingWarning, match="is recorded with replacements") as warned:
        tracked = graph.invoke(given, config())["messages"]
        graph.invoke({"messages": [HumanMessage("b", id="v")]}, config())
    assert [m.type for m in tracked] == [m.type for m in bare]
    assert len(warned) == 1 and len(runs) == 3
    made, first = history.log("t")[-2::]
    assert texts(first) == ["a"] and texts(made)[1] == recorded
    assert [edit.author for edit in made.edits] == ["node"]
    strict = track_edits(node, history=GraphHistory(), on_error="raise")
    with pytest.raises(ContextError, match="replacements"):
        graph_of(strict).invoke(given, config())


class Added(TypedDict):
    messages: Annotated[list[Any], operator.add]


def rewrite(state: Any) -> dict[str, Any]:
    all_of_them = Remove(id=REMOVE_ALL_MESSAGES)
    return {"messages": [all_of_them, AIMessage("draft", id="2"), AIMessage("final", id="2")]}


def repeat(state: Any) -> dict[str, Any]:
    return {"messages": [*state["messages"], AIMessage("hi", id="a")]}


@pytest.mark.parametrize(("node", "state"), [(rewrite, MessagesState), (repeat, Added)])
def test_ids_that_repeat(node: Any, state: Any, history: GraphHistory) -> None:
    """LangGraph lets a state hold an id twice: behind REMOVE_ALL_MESSAGES, and by operator.add."""
    given = {"messages": [HumanMessage("a", id="0"), HumanMessage("b", id="0")]}
    if state is MessagesState:
        given = {"messages": [HumanMessage("a", id="0")]}
    bare = graph_of(node, state).invoke(given, config())["messages"]
    with pytest.warns(TrackingWarning, match="of an earlier one"):
        tracked = graph_of(track_edits(node, history=history), state).invoke(given, config())
    assert said(tracked["messages"]) == said(bare)
    assert texts(history.log("t")[0]) == [message.content for message in bare]


@pytest.mark.parametrize("fault", ["locked", "closed"])
def test_a_store_that_fails_costs_the_record_and_not_the_run(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    store = SQLiteHistoryStore(path, timeout_s=0.01)
    history = GraphHistory(store)
    node = track_edits(lambda state: {"messages": [AIMessage("x")]}, history=history)
    if fault == "locked":
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
    else:
        store.close()
    with pytest.warns(TrackingWarning, match="not recorded"):
        final = graph_of(node).invoke(question(), config())
    assert final["messages"][-1].content == "x"
    strict = track_edits(
        lambda state: {"messages": [AIMessage("x")]}, history=history, on_error="raise"
    )
    with pytest.raises((HistoryStoreError, sqlite3.ProgrammingError)):
        graph_of(strict).invoke(question(), config())
    if fault == "locked":
        other.execute("ROLLBACK")
        graph_of(node).invoke(question(), config())
        assert edits(history) == [("append", "node", None)]


def test_warnings_that_are_errors_end_no_run(history: GraphHistory) -> None:
    node = track_edits(lambda state: {"messages": [AIMessage("\ud835")]}, history=history)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        final = graph_of(node).invoke(question(), config())
    assert len(final["messages"]) == 3 and len(history.log("t")) == 2


@pytest.mark.parametrize(
    "update",
    [
        [{"role": "assistant", "content": "x"}],
        [("ai", "x")],
        ("ai", "x"),
        "x",
        {"role": "assistant", "content": "x"},
    ],
    ids=str,
)
def test_messages_of_any_form(update: Any, history: GraphHistory) -> None:
    """An OpenAI dict under operator.add ended the run: it has no attribute `id`."""
    forms = isinstance(update, list)
    state = Added if forms else MessagesState
    given = {"messages": [{"role": "user", "content": "q"}]}
    node = track_edits(lambda state: {"messages": update}, history=history)
    graph = graph_of(node, state, history.saver(InMemorySaver()))
    for _ in range(2):
        final = graph.invoke(given, config())["messages"]
    if forms:
        assert len(final) == 4 and not any(isinstance(each, AIMessage) for each in final)
    log = history.log("t")
    assert texts(log[0]) == ["q", "x"] * 2
    assert [(kind, author) for kind, author, _ in edits(history)] == [
        ("append", "node"),
        ("append", "input"),
        ("append", "node"),
    ]


class Planned(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    plan: list[dict[str, str]]
    notes: str


def test_plans_and_notes_are_parts_of_the_context(history: GraphHistory) -> None:
    """A plan's revision is the first example of an edit, and only messages could be tracked."""

    def revise(state: Planned) -> Any:
        first, *rest = state["plan"]
        steps = [{**first, "state": "done"}, {"step": "call the pilot"}, *rest]
        return {"plan": steps, "notes": f"{state['notes']} It rains.", "messages": [AIMessage("x")]}

    contexts = {"messages": None, "plan": None, "notes": StatePart(kind="refresh_evidence")}
    node = track_edits(revise, history=history, contexts=contexts)
    graph = graph_of(node, Planned, history.saver(InMemorySaver()))
    plan = [{"step": "look"}, {"step": "answer"}]
    given = {"messages": [HumanMessage("q")], "plan": plan, "notes": "Wind."}
    bare = graph_of(revise, Planned).invoke(given, config())
    final = graph.invoke(given, config())
    assert (final["plan"], final["notes"]) == (bare["plan"], bare["notes"])
    assert history.keys("t") == ("messages", "notes", "plan")
    assert edits(history) == [("append", "node", None)]

    newest = history.log("t", key="plan")[0]
    assert texts(newest) == [
        '{"step": "look", "state": "done"}',
        '{"step": "call the pilot"}',
        '{"step": "answer"}',
    ]
    assert {str(edit.kind) for edit in newest.edits} == {"revise_plan"}
    assert {edit.author for edit in newest.edits} == {"node"}
    plans = history.open("t", key="plan")
    forms = plans.blame(0)
    assert [form.message.text for form in forms] == [texts(newest)[0], '{"step": "look"}']
    assert len(plans.diff(*[version.id for version in plans.log()[::-1]])) == 2
    (edit,) = history.log("t", key="notes")[0].edits
    assert (str(edit.kind), edit.author) == ("refresh_evidence", "node")
    assert texts(history.log("t", key="notes")[0]) == ["Wind. It rains."]


def test_a_part_with_a_renderer(history: GraphHistory) -> None:
    def shown(plan: list[dict[str, str]]) -> list[str]:
        return [f"- {each['step']}" for each in plan]

    node = track_edits(
        lambda state: {"plan": [*state["plan"], {"step": "b"}]},
        history=history,
        contexts={"plan": shown},
    )
    graph_of(node, Planned).invoke({"plan": [{"step": "a"}]}, config())
    assert texts(history.log("t")[0]) == ["- a", "- b"]
    with pytest.raises(InputError, match="contexts"):
        track_edits(lambda state: state, history=history, contexts={"plan": 3})  # type: ignore[dict-item]


class Two(MessagesState):
    scratch: Annotated[list[AnyMessage], add_messages]


def test_two_keys_of_messages_do_not_mix(history: GraphHistory) -> None:
    """Their histories were one: what the other key has counted as deleted."""

    def both(state: Two) -> dict[str, Any]:
        return {"messages": [AIMessage("m")], "scratch": [AIMessage("s")]}

    node = track_edits(track_edits(both, history=history), history=history, messages_key="scratch")
    graph = graph_of(node, Two, history.saver(InMemorySaver()))
    for _ in range(2):
        given = {"messages": [HumanMessage("q")], "scratch": [HumanMessage("w")]}
        final = graph.invoke(given, config())
    for key in ("messages", "scratch"):
        log = history.log("t", key=key)
        assert texts(log[0]) == [message.text for message in final[key]]
        assert [str(edit.kind) for version in log for edit in version.edits] == ["append"] * 3


def test_two_graphs_with_one_thread_id(history: GraphHistory) -> None:
    """With checkpointers of their own they know nothing of each other, and their histories were
    one. A graph's first context now has no parent; under a name of its own, it is in none but its
    own history."""
    for name, where in (("a", history), ("b", history), ("c", history.for_graph("c"))):
        node = track_edits(
            lambda state, name=name: {"messages": [AIMessage(f"from {name}")]}, history=where
        )
        graph = graph_of(node, saver=where.saver(InMemorySaver()))
        graph.invoke({"messages": [HumanMessage(f"to {name}")]}, config())
        assert texts(where.log("t")[0]) == [f"to {name}", f"from {name}"]
        assert [(str(e.kind)) for v in where.log("t") for e in v.edits] == ["append"]
    assert len(history.open("t").branches()) == 2 and len(history.log("t")) == 2
    history.delete_thread("t")
    assert history.log("t") == () and len(history.for_graph("c").log("t")) == 2


class Plain(TypedDict):
    messages: list[AnyMessage]


def test_how_updates_are_merged_is_read_from_the_schema(history: GraphHistory) -> None:
    """A state without a reducer was taken for one with `add_messages`."""

    def trim(state: Plain) -> dict[str, Any]:
        return {"messages": state["messages"][-1:]}

    given = {"messages": [HumanMessage(str(i), id=str(i)) for i in range(4)]}
    graph_of(track_edits(trim, history=history), Plain).invoke(given, config())
    assert texts(history.log("t")[0]) == ["3"]
    assert {kind for kind, _, _ in edits(history)} == {"delete"}
    wrong = track_edits(
        lambda state: {"messages": [AIMessage("x")]}, history=history, reducer=operator.add
    )
    with pytest.warns(TrackingWarning, match=r"by .*, and .* leave reducer= out"):
        final = graph_of(wrong).invoke(given, config("u"))["messages"]
    assert texts(history.log("u")[0]) == [message.text for message in final]


def grow(old: list[Any], new: list[Any]) -> list[Any]:
    old.extend(new)
    new.clear()
    return old


class Growing(TypedDict):
    messages: Annotated[list[AnyMessage], grow]


def test_a_reducer_that_changes_its_arguments_changes_no_state(history: GraphHistory) -> None:
    """Predicting the next state runs the reducer once more."""

    def node(state: Growing) -> dict[str, Any]:
        return {"messages": [AIMessage("x", id="x")]}

    given = [HumanMessage("q", id="q")]
    bare = graph_of(node, Growing).invoke({"messages": list(given)}, config())
    tracked = graph_of(track_edits(node, history=history), Growing)
    assert said(tracked.invoke({"messages": list(given)}, config())["messages"]) == said(
        bare["messages"]
    )
    assert texts(history.log("t")[0]) == ["q", "x"]


def test_a_key_that_the_state_does_not_have_is_said_once(history: GraphHistory) -> None:
    node = track_edits(lambda state: {"messages": []}, history=history, messages_key="chat")
    graph = graph_of(node)
    with pytest.warns(TrackingWarning, match="has no key 'chat'.*messages") as warned:
        for _ in range(3):
            graph.invoke(question(), config())
    assert len(warned) == 1


def test_a_run_without_a_thread_says_so(history: GraphHistory) -> None:
    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage("x")]}

    with pytest.warns(TrackingWarning, match="thread_id"):
        assert len(chain(track_edits(node, history=history)).invoke(question())["messages"]) == 3
    with pytest.raises(ContextError, match="thread_id"):
        chain(track_edits(node, history=history, on_error="raise")).invoke(question())


def test_a_saver_without_a_tracked_node_says_that_nothing_is_recorded(
    history: GraphHistory,
) -> None:
    graph = graph_of(lambda state: {}, saver=history.saver(InMemorySaver()))
    with pytest.warns(TrackingWarning, match="records nothing by itself") as warned:
        graph.invoke(question(), config())
    assert len(warned) == 1


def test_wrong_arguments_are_refused(history: GraphHistory) -> None:
    with pytest.raises(InputError, match="leave store out"):
        GraphHistory(":memory:")
    with pytest.raises(InputError, match="on_error"):
        track_edits(repeat, history=history, on_error="ignore")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="contxts"):
        track_edits(repeat, history=history, contxts={})  # type: ignore[call-overload]
    with pytest.raises(ContextError, match="no kind"):
        track_edits(repeat, history=history, contexts={"plan": StatePart(kind="improve")})


def test_the_functional_api_is_refused(history: GraphHistory) -> None:
    """Its results are no updates of a state: what was recorded of them was false."""

    @task
    def work(text: str) -> list[AIMessage]:
        return [AIMessage(text)]

    @entrypoint(checkpointer=InMemorySaver())
    def flow(messages: list[Any]) -> Any:
        return work("x").result()

    for made in (work, flow):
        with pytest.raises(InputError, match="functional API"):
            track_edits(made, history=history)

    def run(messages: list[Any]) -> Any:
        return [AIMessage(str(len(messages)))]

    inner = task(track_edits(run, history=history))  # type: ignore[call-overload]

    @entrypoint(checkpointer=InMemorySaver())
    @track_edits(history=history)
    def outer(messages: list[Any]) -> Any:
        return inner(messages).result()

    with pytest.warns(TrackingWarning, match="functional API") as warned:
        assert outer.invoke([HumanMessage("q")], config())[0].content == "1"
    assert len(warned) == 2 and history.store.threads() == ()
