"""Which versions `PatchKVMiddleware` keeps for which agent: in graphs, in tools, over branches."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain.tools import tool
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send

from patchkv_agents.context import ContextHistory, MemoryHistoryStore, ThreadKey
from patchkv_agents.errors import InputError
from patchkv_langchain import ChatPatchKV, PatchKVMiddleware
from patchkv_langgraph.notices import TrackingWarning
from tests.langchain.agents import ScriptedModel, look, looking, middle_edits, saying
from tests.langchain.test_middleware import CLEARS, GO, THREAD, clearing, run


def answers(count: int = 20) -> ScriptedModel:
    return saying(AIMessage(f"Answer {number}.") for number in range(count))


def branches(history: ContextHistory) -> dict[str, list[str]]:
    """The texts of what users said, by branch."""
    return {
        name: [m.text for m in history.log(name)[0].messages if m.role == "user"]
        for name in history.branches()
    }


def say(graph: Any, text: str, config: Any = THREAD) -> Any:
    return graph.invoke({"messages": [HumanMessage(text)]}, config)


# Branches


def test_time_travel_is_a_branch() -> None:
    """Another model's versions had no parent: what was said instead was an edit on `main`."""
    patchkv = PatchKVMiddleware()
    agent = create_agent(
        answers(), [], middleware=patchkv.instrument([]), checkpointer=InMemorySaver()
    )
    say(agent, "first")
    early = agent.get_state(THREAD).config
    say(agent, "second")
    say(agent, "instead", early)
    say(agent, "deeper")
    history = patchkv.history_of("t")
    assert branches(history) == {
        "main": ["first", "second"],
        "main-2": ["first", "instead", "deeper"],
    }
    assert middle_edits(history) == []


@pytest.mark.parametrize("how", ["sync", "async"])
def test_update_state_in_the_past_is_a_branch(how: str) -> None:
    patchkv = PatchKVMiddleware(history=(store := MemoryHistoryStore()))
    agent = create_agent(
        answers(), [], middleware=patchkv.instrument([]), checkpointer=InMemorySaver()
    )
    for text in ("first", "second"):
        run(agent, how, {"messages": [HumanMessage(text)]})
    past = [s for s in agent.get_state_history(THREAD) if s.next == ("model",)][1]
    said = past.values["messages"][0]
    changed = HumanMessage("first of all", id=said.id)
    fork = agent.update_state(past.config, {"messages": [changed]})
    run(agent, how, None, fork)
    history = patchkv.history_of("t")
    assert branches(history) == {"main": ["first", "second"], "main-2": ["first of all"]}
    first, second, edited = map(history.get, history.version_ids())
    assert second.parents == edited.parents == (first.id,)
    assert all(store.load(history.key, version).checkpoint_id for version in history.version_ids())


def test_a_checkpoint_that_is_replayed_makes_no_version() -> None:
    patchkv = PatchKVMiddleware()
    agent = create_agent(
        answers(), [], middleware=patchkv.instrument([]), checkpointer=InMemorySaver()
    )
    say(agent, "first")
    say(agent, "second")
    for past in [s for s in agent.get_state_history(THREAD) if s.next == ("model",)]:
        agent.invoke(None, past.config)
    history = patchkv.history_of("t")
    assert len(history.version_ids()) == 2
    assert branches(history) == {"main": ["first", "second"]}


def test_update_state_of_the_present_is_an_edit() -> None:
    patchkv = PatchKVMiddleware()
    agent = create_agent(
        answers(), [], middleware=patchkv.instrument([]), checkpointer=InMemorySaver()
    )
    state = say(agent, "first")
    changed = HumanMessage("first of all", id=state["messages"][0].id)
    agent.update_state(THREAD, {"messages": [changed]})
    say(agent, "second")
    history = patchkv.history_of("t")
    assert branches(history) == {"main": ["first of all", "second"]}
    assert [edit[0] for edit in middle_edits(history)] == ["other"]


# Agents inside of graphs


def test_an_agent_in_a_graph_has_one_log_over_turns() -> None:
    """Each turn had a log of its own, so that the edits between turns were in none."""
    patchkv = PatchKVMiddleware()
    agent = create_agent(answers(), [], middleware=patchkv.instrument([]), name="helper")

    def edit(state: MessagesState) -> dict[str, Any]:
        first, count = state["messages"][0], len(state["messages"])
        return {"messages": [first.model_copy(update={"content": f"Of {count} messages."})]}

    builder = StateGraph(MessagesState)
    builder.add_node(edit)
    builder.add_node("helper", agent)
    builder.add_edge(START, "edit")
    builder.add_edge("edit", "helper")
    graph = builder.compile(checkpointer=InMemorySaver())
    for turn in range(3):
        say(graph, f"Question {turn}.")
    assert patchkv.threads() == (ThreadKey("t", "helper"),)
    assert [edit[0] for edit in middle_edits(patchkv.history_of("t", "helper"))] == ["other"] * 2


def test_agents_side_by_side_have_logs_of_their_own() -> None:
    patchkv = PatchKVMiddleware()
    agent = create_agent(
        saying(looking(0, then="Done.")), [look], middleware=patchkv.instrument([]), name="helper"
    )

    def send(state: MessagesState) -> list[Send]:
        return [Send("helper", {"messages": [HumanMessage(f"Room {n}")]}) for n in range(3)]

    builder = StateGraph(MessagesState)
    builder.add_node("helper", agent)
    builder.add_conditional_edges(START, send, ["helper"])
    graph = builder.compile(checkpointer=InMemorySaver())
    say(graph, "Go.")
    assert [key.namespace for key in patchkv.threads()] == ["helper", "helper#2", "helper#3"]
    for key in patchkv.threads():
        (version,) = patchkv.history_of("t", key.namespace).log()
        assert len([m for m in version.messages if m.text.startswith("Room")]) == 1


# Agents inside of tools


@tool
def ask_guide(question: str) -> str:
    """Ask the guide."""
    guide = create_agent(
        saying(looking(2, then="It is open.")), [look], middleware=[clearing()], name="guide"
    )
    answer: str = guide.invoke({"messages": [HumanMessage(question)]})["messages"][-1].text
    return answer


def asking(times: int) -> Any:
    for number in range(times):
        args = {"question": f"Is room {number} open?"}
        yield AIMessage("", tool_calls=[{"id": f"ask{number}", "name": "ask_guide", "args": args}])
    while True:
        yield AIMessage("Done.")


@pytest.mark.parametrize("thread", [True, False])
def test_a_subagent_needs_no_middleware_of_its_own(thread: bool) -> None:
    patchkv = PatchKVMiddleware()
    agent = create_agent(
        saying(asking(2)),
        [ask_guide],
        middleware=patchkv.instrument([]),
        checkpointer=InMemorySaver() if thread else None,
    )
    agent.invoke(GO, THREAD if thread else None)
    keys = patchkv.threads()
    assert len({key.thread for key in keys}) == 1
    assert sorted(key.namespace for key in keys) == ["", "tools/guide", "tools/guide#2"]
    for key in [key for key in keys if key.namespace]:
        assert middle_edits(patchkv.history_of(key.thread, key.namespace)) == [CLEARS]


class Binds(ScriptedModel):
    """Takes tools as real models do."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=[convert_to_openai_tool(each) for each in tools])


def test_subagents_of_deepagents_are_tracked() -> None:
    deepagents = pytest.importorskip("deepagents")

    def delegating() -> Any:
        for number in range(2):
            args = {"description": f"Look at {number}.", "subagent_type": "guide"}
            yield AIMessage("", tool_calls=[{"id": f"c{number}", "name": "task", "args": args}])
        while True:
            yield AIMessage("Done.")

    patchkv = PatchKVMiddleware()
    guide = {
        "name": "guide",
        "description": "Knows the rooms.",
        "system_prompt": "You guide.",
        "model": Binds(messages=iter(looking(2, then="It is open."))),
        "tools": [look],
    }
    agent = deepagents.create_deep_agent(
        saying(delegating()),
        subagents=[guide],
        middleware=patchkv.instrument([]),
        checkpointer=InMemorySaver(),
    )
    asyncio.run(agent.ainvoke(GO, THREAD))
    names = [key.namespace for key in patchkv.threads()]
    assert sorted(names) == ["", "tools/guide", "tools/guide#2"]
    first = patchkv.history_of("t", "tools/guide")
    assert len(first.log()) == 3
    assert first.log()[0].messages[1].text == "Look at 0."
    assert "look" in str(first.log()[0].tools)


def test_a_summary_of_deepagents_is_one_edit() -> None:
    """It changes the request in each call; new calls behind it were edits of old ones."""
    deepagents = pytest.importorskip("deepagents")
    summarization = pytest.importorskip("deepagents.middleware.summarization")
    backends = pytest.importorskip("deepagents.backends")
    patchkv = PatchKVMiddleware()
    summarizes = summarization.SummarizationMiddleware(
        model=saying(AIMessage(f"Summary {number}") for number in range(9)),
        backend=backends.StateBackend(),
        trigger=("messages", 8),
        keep=("messages", 3),
    )
    agent = deepagents.create_deep_agent(
        saying(looking(9)),
        [look],
        middleware=patchkv.instrument([summarizes]),
        checkpointer=InMemorySaver(),
    )
    agent.invoke(GO, THREAD)
    edits = [edit for v in patchkv.history_of("t").log() for edit in v.edits]
    told = {(str(e.kind), e.author, e.old_indices, e.new_indices) for e in edits if e.old_indices}
    assert told == {("summarize", "SummarizationMiddleware", (1, 2, 3, 4, 5), (1,))}


def test_a_subagent_on_the_engine_is_found(chat_engine: Any) -> None:
    model = ChatPatchKV(engine=chat_engine, max_tokens=3)

    @tool
    def ask_engine(question: str) -> str:
        """Ask."""
        helper = create_agent(model, [], name="helper")
        text: str = helper.invoke({"messages": [HumanMessage(question)]})["messages"][-1].text
        return text

    call = {"id": "1", "name": "ask_engine", "args": {"question": "Why?"}}
    patchkv = PatchKVMiddleware()
    agent = create_agent(
        saying([AIMessage("", tool_calls=[call]), AIMessage("Done.")]),
        [ask_engine],
        middleware=patchkv.instrument([]),
        checkpointer=InMemorySaver(),
    )
    agent.invoke(GO, THREAD)
    assert ThreadKey("t", "tools/helper") in patchkv.threads()
    (version,) = patchkv.history_of("t", "tools/helper").log()
    assert version.messages[-1].text == "Why?"


# What goes wrong


class Fails(MemoryHistoryStore):
    def put(self, *arguments: Any, **keywords: Any) -> None:
        raise OSError("the disk is full")


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_store_that_fails_does_not_end_the_run(how: str) -> None:
    patchkv = PatchKVMiddleware(history=Fails())
    agent = create_agent(
        saying(looking(1)), [look], middleware=patchkv.instrument([]), checkpointer=InMemorySaver()
    )
    with pytest.warns(TrackingWarning, match="the disk is full"):
        state = run(agent, how)
    assert state["messages"][-1].text == "done"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # then it is logged
        assert run(agent, how)["messages"][-1].text == "done"
    strict = PatchKVMiddleware(history=Fails(), on_error="raise")
    agent = create_agent(saying(looking(0)), [look], middleware=[strict])
    with pytest.raises(OSError, match="full"):
        run(agent, how)


@pytest.mark.parametrize("content", ["half an emoji \ud83d", [{"type": "text", "text": {1, 2}}]])
def test_messages_that_cannot_be_stored_do_not_end_the_run(content: Any) -> None:
    patchkv = PatchKVMiddleware()
    agent = create_agent(
        answers(), [], middleware=patchkv.instrument([clearing()]), checkpointer=InMemorySaver()
    )
    odd = HumanMessage("x")
    odd.content = content
    with pytest.warns(TrackingWarning, match="with replacements"):
        assert agent.invoke({"messages": [odd]}, THREAD)["messages"][-1].text == "Answer 0."
    (version,) = patchkv.history_of("t").log()
    assert len(version.messages) == 1


def test_a_middleware_behind_it_is_pointed_out_once() -> None:
    """What that one changes was in no version, and nothing said so."""

    class Shortens(AgentMiddleware[Any, Any, Any]):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            return handler(request.override(messages=request.messages[-1:]))

    patchkv = PatchKVMiddleware()
    agent = create_agent(
        saying(looking(3)), [look], middleware=[patchkv, Shortens()], checkpointer=InMemorySaver()
    )
    with pytest.warns(TrackingWarning, match="put PatchKVMiddleware last") as caught:
        agent.invoke(GO, THREAD)
    assert len(caught) == 1
    versions = patchkv.history_of("t").log()
    assert {len(version.messages) for version in versions} == {1}, "what the model was shown"


def test_middleware_in_front_is_no_reason_to_warn(recwarn: Any) -> None:
    patchkv = PatchKVMiddleware()
    agent = create_agent(
        saying(looking(3)), [look], middleware=[clearing(), patchkv], checkpointer=InMemorySaver()
    )
    agent.invoke(GO, THREAD)
    assert [w for w in recwarn if w.category is TrackingWarning] == []


def test_a_file_is_a_history(tmp_path: Any) -> None:
    for turn in range(2):
        patchkv = PatchKVMiddleware(
            history=tmp_path / "edits.db" if turn else str(tmp_path / "edits.db")
        )
        agent = create_agent(answers(), [], middleware=patchkv.instrument([]))
        say(agent, f"Turn {turn}")
        assert len(patchkv.history_of("t").version_ids()) == turn + 1
    assert ThreadKey("t") in patchkv.threads()


@pytest.mark.parametrize(
    "arguments", [{"history": 3}, {"history": ":memory:"}, {"on_error": "ignore"}]
)
def test_wrong_arguments_are_errors(arguments: Any) -> None:
    with pytest.raises(InputError):
        PatchKVMiddleware(**arguments)


def test_no_store_is_touched_on_the_event_loop(tmp_path: Any) -> None:
    """Servers such as `langgraph dev` refuse calls that block the loop, and the agent died."""
    blockbuster = pytest.importorskip("blockbuster")
    patchkv = PatchKVMiddleware(history=tmp_path / "edits.db", on_error="raise")

    @tool
    async def ask_async(question: str) -> str:
        """Ask the guide."""
        guide = create_agent(saying(looking(1)), [look], name="guide")
        state = await guide.ainvoke({"messages": [HumanMessage(question)]})
        text: str = state["messages"][-1].text
        return text

    call = {"id": "1", "name": "ask_async", "args": {"question": "Why?"}}
    agent = create_agent(
        saying([AIMessage("", tool_calls=[call]), *(AIMessage("Done.") for _ in range(9))]),
        [ask_async],
        middleware=patchkv.instrument([clearing()]),
        checkpointer=InMemorySaver(),
    )

    async def turns() -> None:
        for turn in range(2):
            await agent.ainvoke({"messages": [HumanMessage(f"Turn {turn}")]}, THREAD)

    with blockbuster.blockbuster_ctx():
        asyncio.run(turns())
    assert len(patchkv.history_of("t").log()) == 3
    assert len(patchkv.history_of("t", "tools/guide").log()) == 2
