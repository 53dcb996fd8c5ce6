"""Whose KV state a call of the chat model uses: conversations never mix, and nobody waits forever.

The engine has random weights: its greedy answers depend on all that is in the context, so that
anything taken from another conversation shows.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages

from patchkv_agents.errors import PatchKVError
from patchkv_langchain import ChatPatchKV
from patchkv_langchain.chat_threads import ChatThreads, chat_threads
from patchkv_langchain.conversations import Conversation

if TYPE_CHECKING:
    from patchkv_agents.engine import Engine

SYSTEM = SystemMessage("You answer questions about a long page. " + "All is as it was. " * 20)


def thread_of(name: str, **configurable: Any) -> Any:
    return {"configurable": {"thread_id": name, **configurable}}


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream", "batch", "sequence"])
def test_the_thread_id_arrives_by_each_way(chat_engine: Engine, way: str) -> None:
    model: Any = ChatPatchKV(engine=chat_engine, max_tokens=2)
    config = thread_of("mine")

    async def drain() -> None:
        async for _ in model.astream("Hi", config=config):
            pass

    if way == "invoke":
        model.invoke("Hi", config=config)
    elif way == "ainvoke":
        asyncio.run(model.ainvoke("Hi", config=config))
    elif way == "stream":
        list(model.stream("Hi", config=config))
    elif way == "astream":
        asyncio.run(drain())
    elif way == "batch":
        model.batch(["Hi", "Ho"], config=config)
    else:
        ((lambda text: text) | model.bind(seed=1)).invoke("Hi", config=config)
    assert {thread.id for thread in chat_engine.pool.threads()} == {"mine"}


class State(TypedDict):
    messages: Annotated[list[BaseMessage], add_messages]


@pytest.mark.parametrize("stream_mode", ["values", "messages"])
def test_the_thread_id_arrives_in_a_graph(chat_engine: Engine, stream_mode: Any) -> None:
    """Streamed by `messages`, LangChain calls the model without a run manager."""
    model = ChatPatchKV(engine=chat_engine, max_tokens=2)

    def answer(state: State) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    def summarise(state: State) -> dict[str, Any]:
        summary = model.invoke(
            [HumanMessage("Sum up.")], config={"metadata": {"lc_source": "summarization"}}
        )
        return {"messages": [summary]}

    graph = StateGraph(State)
    graph.add_node(answer)
    graph.add_node(summarise)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", "summarise")
    compiled = graph.compile(checkpointer=InMemorySaver())
    for _ in range(2):
        list(
            compiled.stream(
                {"messages": [HumanMessage("Hi")]}, thread_of("graph"), stream_mode=stream_mode
            )
        )
    assert {thread.id for thread in chat_engine.pool.threads()} == {"graph"}
    namespaces = sorted(thread.namespace for thread in chat_engine.pool.threads())
    assert [namespace.split("/")[0] for namespace in namespaces] == ["answer", "summarise"]


def test_another_call_in_between_costs_the_conversation_nothing(chat_engine: Engine) -> None:
    model = ChatPatchKV(engine=chat_engine, max_tokens=2, policy="default")
    asked = [SYSTEM, HumanMessage("What is new?")]
    first = model.invoke(asked, config=thread_of("t"))
    model.invoke(
        [HumanMessage("Sum up: " + str(SYSTEM.content))],
        config={**thread_of("t"), "metadata": {"lc_source": "summarization"}},
    )
    after = model.invoke([*asked, first, HumanMessage("And now?")], config=thread_of("t"))
    usage: Any = after.usage_metadata
    before: Any = first.usage_metadata
    assert usage["input_token_details"]["cache_read"] >= before["input_tokens"] - 1
    assert after.response_metadata["recovery"]["is_exact"]


def play(model: ChatPatchKV, user: str, config: Any) -> list[str]:
    """Four turns of one user, with an edit of an early message before each."""
    said: list[BaseMessage] = [SYSTEM]
    answers = []
    for turn in range(4):
        said.append(HumanMessage(f"{user} asks question {turn}. " + f"Mind {user}. " * 12))
        answer = model.invoke(said, config=config)
        answers.append(str(answer.content))
        said.append(answer)
        said[1] = HumanMessage(f"{user} changes the first question, time {turn}.")
    return answers


@pytest.mark.parametrize("policy", ["exact", "default"])
def test_concurrent_users_never_mix(
    chat_engine: Engine, tiny_chat_engine: Engine, policy: str
) -> None:
    users = [f"user-{number}" for number in range(4)]
    alone = ChatPatchKV(engine=tiny_chat_engine, policy=policy, max_tokens=6)
    expected = [play(alone, user, thread_of(f"{policy}-{user}")) for user in users]
    together = ChatPatchKV(engine=chat_engine, policy=policy, max_tokens=6)
    with ThreadPoolExecutor(len(users)) as pool:
        answers = list(pool.map(lambda user: play(together, user, thread_of(user)), users))
    assert answers == expected
    assert len({tuple(answer) for answer in answers}) == len(users)
    for thread in chat_engine.pool.threads():
        for version in thread.history.log():
            texts = [m.text for m in version.messages if m.role == "user"]
            assert all(thread.id in text for text in texts)


def test_concurrent_users_without_ids_never_mix(
    chat_engine: Engine, tiny_chat_engine: Engine
) -> None:
    users = [f"user-{number}" for number in range(3)]

    def ask(engine: Engine, user: str) -> str:
        model = ChatPatchKV(engine=engine, policy="default", max_tokens=6)
        return str(model.invoke([SYSTEM, HumanMessage(f"{user} asks.")]).content)

    expected = [ask(tiny_chat_engine, user) for user in users]
    with ThreadPoolExecutor(len(users)) as pool:
        assert list(pool.map(lambda user: ask(chat_engine, user), users)) == expected
    assert len(chat_engine.pool.threads()) == len(users)


def test_calls_of_one_conversation_take_turns(chat_engine: Engine) -> None:
    model = ChatPatchKV(engine=chat_engine, max_tokens=6)
    with ThreadPoolExecutor(4) as pool:
        ask = lambda _: model.invoke("Hi", config=thread_of("t")).content  # noqa: E731
        answers = list(pool.map(ask, range(4)))
    assert len(set(answers)) == 1
    assert [thread.id for thread in chat_engine.pool.threads()] == ["t"]


def test_calls_that_begin_alike_without_an_id_do_not_wait(chat_engine: Engine) -> None:
    model = ChatPatchKV(engine=chat_engine, max_tokens=4)
    stream = model.stream("Hi")
    next(stream)
    answer = model.invoke("Hi")  # another conversation, as far as anyone can know
    rest = list(stream)
    assert answer.content and rest
    assert len(chat_engine.pool.threads()) == 2


def test_who_would_wait_for_himself_is_told(chat_engine: Engine) -> None:
    """A stream that its reader holds open cannot end while he waits for it to."""
    model = ChatPatchKV(engine=chat_engine, max_tokens=4)
    stream = model.stream("Hi", config=thread_of("t"))
    next(stream)
    with pytest.raises(PatchKVError, match="close that stream"):
        model.invoke("Hi", config=thread_of("t"))
    stream.close()  # type: ignore[attr-defined]
    assert model.invoke("Hi", config=thread_of("t")).content


def test_retries_find_what_the_failed_call_computed(chat_engine: Engine) -> None:
    model = ChatPatchKV(engine=chat_engine, max_tokens=4)
    asked = [SYSTEM, HumanMessage("What is new?")]
    stream = model.stream(asked, config=thread_of("t"))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    retried = model.invoke(asked, config=thread_of("t"))
    usage: Any = retried.usage_metadata
    assert usage["input_token_details"]["cache_read"] == usage["input_tokens"] - 1


def test_a_fork_goes_on_from_where_it_left(chat_engine: Engine, tiny_chat_engine: Engine) -> None:
    """Time travel: an earlier state is taken up again under the same thread id."""
    model = ChatPatchKV(engine=chat_engine, max_tokens=6)
    asked = [SYSTEM, HumanMessage("What is new?")]
    model.invoke(asked, config=thread_of("t"))
    trunk = [*asked, AIMessage("All is new.")]
    left = [*trunk, HumanMessage("Go left. " * 9)]
    right = [*trunk, HumanMessage("Go right. " * 9)]
    fresh = ChatPatchKV(engine=tiny_chat_engine, max_tokens=6)
    for branch in (left, right, left):
        answer = model.invoke(branch, config=thread_of("t"))
        usage: Any = answer.usage_metadata
        assert usage["input_token_details"]["cache_read"] > len(str(SYSTEM.content)) // 8
        assert answer.content == fresh.invoke(branch, config=thread_of("fresh")).content


def test_the_conversation_used_longest_ago_is_forgotten(chat_engine: Engine) -> None:
    """Its thread is the engine's to keep; it is found again by its name."""
    threads = ChatThreads(chat_engine, limit=1)
    with threads.turn(Conversation("a", "")) as turn:
        first = turn.thread
        with threads.turn(Conversation("b", "")):
            pass
    with threads.turn(Conversation("a", "")) as turn:
        assert turn.thread is first
    assert chat_threads(chat_engine) is chat_threads(chat_engine)
