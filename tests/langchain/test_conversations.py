"""Which conversation a call of the chat model goes on with.

The engine has random weights: its greedy answers depend on all that is in the context, so that
anything taken from another conversation shows.
"""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send

from patchkv_agents.context import parse_tools
from patchkv_langchain import ChatPatchKV
from patchkv_langchain.conversations import Conversation
from patchkv_langchain.graph_steps import GraphStep, agent_path

if TYPE_CHECKING:
    from patchkv_agents.engine import Engine

THREAD: Any = {"configurable": {"thread_id": "t"}}
PAGE = "All is as it was, and the ferry leaves at ten. " * 16
RULES = "You answer questions about a long page. " * 4
SYSTEM = SystemMessage(RULES)


def name_of(
    thread: str | None = None,
    *,
    tools: Any = (),
    template_args: Any = None,
    metadata: Any = None,
    **configurable: Any,
) -> Conversation:
    return Conversation.of(
        thread=thread,
        config={"configurable": configurable, "metadata": metadata or {}},
        tools=parse_tools(tools),
        template_args=template_args or {},
    )


def test_what_makes_another_conversation() -> None:
    main = name_of(thread_id="t", checkpoint_ns="model:1")
    assert main == name_of(thread_id="t", checkpoint_ns="model:2")  # the next step of the node
    agent = name_of(thread_id="t", checkpoint_ns="agent:1|model:1")
    assert agent == name_of(thread_id="t", checkpoint_ns="agent:2|model:5")  # the next turn
    others = [
        agent,
        name_of(thread_id="u", checkpoint_ns="model:1"),
        name_of(thread_id="t", checkpoint_ns="summarize:1"),
        name_of(thread_id="t", checkpoint_ns="agent:1|1|model:1"),  # the second call in the node
        name_of(thread_id="t", checkpoint_ns="model:1", metadata={"lc_agent_name": "helper"}),
        name_of(thread_id="t", checkpoint_ns="model:1", metadata={"lc_source": "summarization"}),
        name_of(thread_id="t", checkpoint_ns="model:1", tools=[{"name": "search"}]),
        name_of(thread_id="t", checkpoint_ns="model:1", template_args={"thinking": False}),
    ]
    assert len({main, *others}) == 1 + len(others)
    assert name_of("t", thread_id="u").thread_id == "t"
    assert not name_of().is_named
    assert agent_path("a:1|1|b:2") == "a|1|b"


def test_tasks_of_one_step_are_side_by_side() -> None:
    def step(outer: str, task: str, inner: str) -> GraphStep:
        namespace = f"agent:{task}"
        found = GraphStep.of(
            {
                "configurable": {
                    "thread_id": "t",
                    "checkpoint_ns": f"{namespace}|model:1",
                    "checkpoint_map": {"": outer, namespace: inner},
                }
            }
        )
        assert found is not None and found.is_nested
        return found

    assert step("c1", "1", "i1").is_same_run(step("c1", "1", "i2"))
    assert step("c1", "1", "i1").is_beside(step("c1", "2", "i3"))
    assert not step("c1", "1", "i1").is_same_run(step("c2", "2", "i3"))
    assert not step("c1", "1", "i1").is_beside(step("c2", "2", "i3"))


# Agents inside of graphs


def subgraph(agent: Any) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("helper", agent)
    builder.add_edge(START, "helper")
    return builder.compile(checkpointer=InMemorySaver())


def called_in_a_node(agent: Any) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("helper", lambda state: agent.invoke(state))
    builder.add_edge(START, "helper")
    return builder.compile(checkpointer=InMemorySaver())


def swarm(agent: Any) -> Any:
    langgraph_swarm = pytest.importorskip("langgraph_swarm")
    built = langgraph_swarm.create_swarm([agent], default_active_agent="helper")
    return built.compile(checkpointer=InMemorySaver())


@pytest.mark.parametrize("build", [subgraph, called_in_a_node, swarm])
@pytest.mark.parametrize("policy", ["exact", "default"])
def test_an_agent_in_a_graph_keeps_its_state_over_turns(
    chat_engine: Engine, build: Any, policy: str
) -> None:
    """Each turn was a conversation of its own: the task ids of the graphs around are new."""
    model = ChatPatchKV(engine=chat_engine, policy=policy, max_tokens=4)
    graph = build(create_agent(model, [], system_prompt=RULES, name="helper"))
    usage: list[Any] = []
    for turn in range(3):
        said = {"messages": [HumanMessage(f"Question {turn}. {PAGE}")]}
        usage.append(graph.invoke(said, THREAD)["messages"][-1].usage_metadata)
    assert len(chat_engine.pool.threads()) == 1
    for before, after in zip(usage, usage[1:], strict=False):
        assert after["input_token_details"]["cache_read"] >= before["input_tokens"]
    (thread,) = chat_engine.pool.threads()
    kinds = {str(edit.kind) for version in thread.history.log() for edit in version.edits}
    assert kinds == {"append"}


@pytest.mark.parametrize("build", [subgraph, called_in_a_node])
def test_an_edit_before_an_agent_in_a_graph_is_recovered(chat_engine: Engine, build: Any) -> None:
    model = ChatPatchKV(engine=chat_engine, policy="default", max_tokens=4)
    graph = build(create_agent(model, [], system_prompt=RULES, name="helper"))
    first = HumanMessage("Read this. " + PAGE, id="page")
    graph.invoke({"messages": [first]}, THREAD)
    graph.invoke({"messages": [HumanMessage("And now? " + PAGE)]}, THREAD)
    changed = HumanMessage("Read this with care. " + PAGE, id="page")
    graph.update_state(THREAD, {"messages": [changed]}, as_node="helper")
    answer = graph.invoke({"messages": [HumanMessage("Once more.")]}, THREAD)["messages"][-1]
    assert answer.response_metadata["recovery"]["restored"] > 0
    (thread,) = chat_engine.pool.threads()
    assert [edit.old_indices for edit in thread.history.log()[0].edits if edit.old_indices] == [
        (1,)
    ]


def test_time_travel_around_an_agent_in_a_graph(chat_engine: Engine) -> None:
    """A fork of the outer graph goes on from the version before the fork, not from the last."""
    model = ChatPatchKV(engine=chat_engine, policy="default", max_tokens=4)
    graph = subgraph(create_agent(model, [], system_prompt=RULES, name="helper"))
    graph.invoke({"messages": [HumanMessage("Read this. " + PAGE)]}, THREAD)
    early = graph.get_state(THREAD).config
    graph.invoke({"messages": [HumanMessage("Go left. " + PAGE)]}, THREAD)
    forked = graph.invoke({"messages": [HumanMessage("Go right, please. " + PAGE)]}, early)
    (thread,) = chat_engine.pool.threads()
    first, left, right = map(thread.history.get, thread.history.version_ids())
    assert left.parents == right.parents == (first.id,)
    recovery = forked["messages"][-1].response_metadata["recovery"]
    assert recovery["is_exact"] and recovery["restored"] == 0


def test_agents_that_run_side_by_side_do_not_share_a_thread(
    chat_engine: Engine, tiny_chat_engine: Engine
) -> None:
    """Two turns in which the same agent is sent three questions at once."""

    def agent_over(engine: Engine) -> Any:
        model = ChatPatchKV(engine=engine, policy="default", max_tokens=4)
        return create_agent(model, [], system_prompt=RULES, name="helper")

    def send(state: MessagesState) -> list[Send]:
        texts = [f"Question {n} of turn {len(state['messages'])}. {PAGE}" for n in range(3)]
        return [Send("helper", {"messages": [HumanMessage(text)]}) for text in texts]

    builder = StateGraph(MessagesState)
    builder.add_node("helper", agent_over(chat_engine))
    builder.add_conditional_edges(START, send, ["helper"])
    graph = builder.compile(checkpointer=InMemorySaver())
    alone = agent_over(tiny_chat_engine)
    for _ in range(2):
        graph.invoke({"messages": [HumanMessage("Go.")]}, THREAD)
    messages = graph.get_state(THREAD).values["messages"]
    questions = {m.content: i for i, m in enumerate(messages) if str(m.content).startswith("Que")}
    assert len(questions) == 6
    for text, index in questions.items():
        expected = alone.invoke({"messages": [HumanMessage(text)]})["messages"][-1]
        assert messages[index + 1].content == expected.content
        assert messages[index + 1].response_metadata["recovery"]["restored"] == 0
    for thread in chat_engine.pool.threads():
        for version in thread.history.log():
            asked = [m for m in version.messages if m.text.startswith("Que")]
            assert len(asked) == 1


def test_a_subagent_that_is_called_again_begins_anew(chat_engine: Engine) -> None:
    """Its second task is no edit of the first; the rows of its instructions are shared."""
    model = ChatPatchKV(engine=chat_engine, policy="default", max_tokens=4)
    subagent = create_agent(model, [], system_prompt=RULES, name="helper")

    def delegate(state: MessagesState) -> Any:
        task = f"Task {len(state['messages'])}. {PAGE}"
        return {"messages": [subagent.invoke({"messages": [HumanMessage(task)]})["messages"][-1]]}

    builder = StateGraph(MessagesState)
    builder.add_node(delegate)
    builder.add_edge(START, "delegate")
    graph = builder.compile(checkpointer=InMemorySaver())
    answers = []
    for _ in range(2):
        answers.append(graph.invoke({"messages": [HumanMessage("Go.")]}, THREAD)["messages"][-1])
    recovery = answers[1].response_metadata["recovery"]
    assert recovery["restored"] == 0 and recovery["is_exact"] and recovery["prefix"] > 0
    assert all(len(thread.history.log()) == 1 for thread in chat_engine.pool.threads())


# Without a thread id


def ask(model: ChatPatchKV, *messages: BaseMessage) -> AIMessage:
    return model.invoke(list(messages))


def edit_kinds(engine: Engine) -> set[str]:
    return {
        str(edit.kind)
        for thread in engine.pool.threads()
        for version in thread.history.log()
        for edit in version.edits
    }


@pytest.mark.parametrize("ids", [False, True], ids=["no ids", "ids by place"])
def test_users_that_begin_alike_share_the_exact_beginning_alone(
    chat_engine: Engine, ids: bool
) -> None:
    """Both say hello and are greeted alike; what they say next was one edit of the other's."""
    model = ChatPatchKV(engine=chat_engine, policy="default", max_tokens=4)

    def numbered(messages: list[BaseMessage]) -> list[BaseMessage]:
        if not ids:
            return messages
        return [m.model_copy(update={"id": str(i)}) for i, m in enumerate(messages)]

    opening = [SYSTEM, HumanMessage("Hello. " + PAGE)]
    greeting = AIMessage(ask(model, *numbered(opening)).content)
    ask(model, *numbered(opening))
    answers = []
    for turn in range(1, 3):
        for user in ("Ada", "Bob"):
            said: list[BaseMessage] = [*opening, greeting]
            for number in range(turn):
                said += [HumanMessage(f"I am {user}. {PAGE} {number}"), AIMessage("Nice.")]
            answers.append(ask(model, *numbered(said[:-1])))
    assert all(a.response_metadata["recovery"]["is_exact"] for a in answers)
    assert edit_kinds(chat_engine) <= {"append"}
    first_of_bob: Any = answers[1].usage_metadata
    assert first_of_bob["input_token_details"]["cache_read"] > 200  # the opening
    for thread in chat_engine.pool.threads():
        for version in thread.history.log():
            text = " ".join(message.text for message in version.messages)
            assert not ("Ada" in text and "Bob" in text)
    histories = [str(thread.history.log()) for thread in chat_engine.pool.threads()]
    assert not any("Ada" in history and "Bob" in history for history in histories)


def test_the_same_call_with_two_results_is_two_conversations(chat_engine: Engine) -> None:
    """The ids of a model's calls follow from its context: two users get the same ones."""
    model = ChatPatchKV(engine=chat_engine, policy="default", max_tokens=4)
    call = {"id": "call_1", "name": "who", "args": {}}
    begun = [SYSTEM, HumanMessage("Who am I?"), AIMessage("", tool_calls=[call])]
    for user in ("Ada", "Bob"):
        result = ToolMessage(f"{user}, of the same house. {PAGE}", tool_call_id="call_1")
        answer = ask(model, *begun, result)
        assert answer.response_metadata["recovery"]["is_exact"]
    assert edit_kinds(chat_engine) == set()


def test_an_edit_without_a_thread_id_is_known_by_the_answers_behind_it(
    chat_engine: Engine,
) -> None:
    model = ChatPatchKV(engine=chat_engine, policy="default", max_tokens=4)
    page = HumanMessage("Read this. " + PAGE)
    said: list[BaseMessage] = [SYSTEM, HumanMessage("Hello."), AIMessage("Hello!"), page]
    said.append(ask(model, *said))  # has the id of its run
    said.append(HumanMessage("And now? " + PAGE))
    said.append(ask(model, *said))
    said[3] = HumanMessage("Read this with care. " + PAGE)
    answer = ask(model, *said, HumanMessage("And then?"))
    assert answer.response_metadata["recovery"]["restored"] > 0
    assert len(chat_engine.pool.threads()) == 1


def test_many_users_at_once_neither_mix_nor_wait_for_each_other(chat_engine: Engine) -> None:
    """Graphs that fan out, in threads and in event loops, and users without a thread id."""
    model = ChatPatchKV(engine=chat_engine, policy="default", max_tokens=3)
    agent = create_agent(model, [], system_prompt=RULES, name="helper")

    def send(state: MessagesState) -> list[Send]:
        asked = state["messages"][-1].content
        return [Send("helper", {"messages": [HumanMessage(f"{asked} {n}")]}) for n in range(3)]

    builder = StateGraph(MessagesState)
    builder.add_node("helper", agent)
    builder.add_conditional_edges(START, send, ["helper"])
    graph = builder.compile(checkpointer=InMemorySaver())

    def use(number: int) -> None:
        user, said = f"user-{number}", [SYSTEM, HumanMessage("Hello. " + PAGE)]
        config: Any = {"configurable": {"thread_id": user}}
        for turn in range(2):
            given: Any = {"messages": [HumanMessage(f"{user} asks in turn {turn}.")]}
            if number % 3 == 0:
                graph.invoke(given, config)
            elif number % 3 == 1:
                asyncio.run(graph.ainvoke(given, config))
            else:
                said += [model.invoke(said), HumanMessage(f"{user} asks in turn {turn}.")]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(use, range(6), timeout=120))
    for thread in chat_engine.pool.threads():
        texts = [m.text for v in thread.history.log() for m in v.messages if m.role == "user"]
        assert len({user for text in texts for user in re.findall(r"user-\d", text)}) <= 1
