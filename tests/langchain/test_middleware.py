"""`PatchKVMiddleware` beside LangChain's own middleware, in real agents with scripted models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    HumanInTheLoopMiddleware,
    ModelRetryMiddleware,
    SummarizationMiddleware,
    TodoListMiddleware,
    before_model,
    dynamic_prompt,
)
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Command

from patchkv_agents import ContextHistory
from patchkv_agents.context import MemoryHistoryStore, SQLiteHistoryStore
from patchkv_agents.errors import PatchKVError
from patchkv_langchain.middleware import PatchKVMiddleware
from patchkv_langchain.notes import served_by
from tests.langchain.agents import ScriptedModel, look, looking, middle_edits, saying

THREAD: Any = {"configurable": {"thread_id": "t"}}
GO: Any = {"messages": [HumanMessage("Go.")]}

CLEARS = ("replace_tool_result", "ContextEditingMiddleware", "request")
SUMMARIZES = ("summarize", "SummarizationMiddleware", "state")


def agent(
    model: BaseChatModel, middleware: Sequence[AgentMiddleware[Any, Any, Any]], **arguments: Any
) -> Any:
    arguments = {"system_prompt": "You guide visitors.", **arguments}
    return create_agent(
        model, [look], middleware=middleware, checkpointer=InMemorySaver(), **arguments
    )


def clearing(keep: int = 1) -> ContextEditingMiddleware:
    return ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=10, keep=keep)])


def summarizing(at: int = 8, keep: int = 3) -> SummarizationMiddleware:
    summaries = saying(f"Summary number {number}." for number in range(9))
    return SummarizationMiddleware(summaries, trigger=("messages", at), keep=("messages", keep))


def run(runner: Any, how: str, given: Any = GO, config: Any = THREAD) -> Any:
    if how == "sync":
        return runner.invoke(given, config)
    return asyncio.run(runner.ainvoke(given, config))


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("watched", [True, False])
def test_langchains_own_middleware_is_tracked_untouched(how: str, watched: bool) -> None:
    """With `instrument` and without: these two leave records behind."""
    patchkv = PatchKVMiddleware()
    others = [summarizing(), clearing()]
    middleware = patchkv.instrument(others) if watched else [*others, patchkv]
    answer = run(agent(saying(looking(5)), middleware), how)
    assert answer["messages"][-1].text == "done"
    assert "patchkv_run" not in answer
    assert middle_edits(patchkv.history_of("t")) == [
        CLEARS,
        CLEARS,
        SUMMARIZES,
        CLEARS,
        CLEARS,
    ]


@pytest.mark.parametrize("how", ["sync", "async"])
def test_middleware_that_records_nothing_is_known_by_its_name(how: str) -> None:
    class Shortens(AgentMiddleware[Any, Any, Any]):
        def _shortened(self, request: Any) -> Any:
            first, *rest = request.messages
            return request.override(messages=[first, *rest[-4:]])

        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            return handler(self._shortened(request))

        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            return await handler(self._shortened(request))

    @before_model
    def drops_all(state: Any, runtime: Any) -> dict[str, Any] | None:
        if len(state["messages"]) != 9:
            return None
        return {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), *state["messages"][-2:]]}

    patchkv = PatchKVMiddleware()
    runner = agent(saying(looking(4)), patchkv.instrument([drops_all, Shortens()]))
    run(runner, how)
    edits = middle_edits(patchkv.history_of("t"))
    assert edits[:2] == [("delete", "Shortens", "request")] * 2
    assert len(edits) > 2
    assert {edit[1:] for edit in edits[2:]} == {("drops_all", "state")}


def test_unwatched_changes_are_known_to_be_of_the_request() -> None:
    class Shouts(AgentMiddleware[Any, Any, Any]):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            first = request.messages[0]
            shouted = first.model_copy(update={"content": first.text * len(request.messages)})
            return handler(request.override(messages=[shouted, *request.messages[1:]]))

    patchkv = PatchKVMiddleware()
    agent(saying(looking(1)), [Shouts(), patchkv]).invoke(GO, THREAD)
    (edit,) = middle_edits(patchkv.history_of("t"))
    assert edit[1:] == (None, "request")


def test_a_changed_system_prompt_is_its_makers_not_the_last_ones() -> None:
    """`TodoListMiddleware` adds to each prompt, behind the one that changes it."""
    hours = iter(range(9, 18))

    @dynamic_prompt
    def clock(request: Any) -> str:
        return f"You guide visitors. It is {next(hours)} o'clock."

    patchkv = PatchKVMiddleware()
    middleware = patchkv.instrument([clock, TodoListMiddleware()])
    agent(saying(looking(2)), middleware, system_prompt=None).invoke(GO, THREAD)
    assert middle_edits(patchkv.history_of("t")) == [("rewrite_system", "clock", "request")] * 2


def test_revised_plans_are_in_the_log() -> None:
    def planning() -> Any:
        for number, status in enumerate(["pending", "completed"]):
            todos = [{"content": "See the clocks.", "status": status}]
            call = {"id": f"plan_{number}", "name": "write_todos", "args": {"todos": todos}}
            yield AIMessage("", tool_calls=[call])
        yield AIMessage("done")

    patchkv = PatchKVMiddleware()
    runner = agent(saying(planning()), patchkv.instrument([TodoListMiddleware()]))
    runner.invoke(GO, THREAD)
    revised = ("revise_plan", "TodoListMiddleware", "state")
    assert middle_edits(patchkv.history_of("t")) == [revised, revised]


def test_the_graph_is_the_same_with_watched_middleware() -> None:
    others = [summarizing(), clearing(), TodoListMiddleware()]
    patchkv = PatchKVMiddleware()
    plain = agent(saying(looking(1)), [*others, patchkv]).get_graph()
    watched = agent(saying(looking(1)), patchkv.instrument(others)).get_graph()
    assert watched.nodes.keys() == plain.nodes.keys()
    assert [tuple(edge) for edge in watched.edges] == [tuple(edge) for edge in plain.edges]
    assert all("before_model" not in vars(other) for other in others)


def test_a_retried_call_counts_once() -> None:
    class Fails(ScriptedModel):
        failures: int = 0

        def _generate(self, *arguments: Any, **keywords: Any) -> Any:
            self.failures += 1
            if self.failures % 2:
                raise ConnectionError("try again")
            return super()._generate(*arguments, **keywords)

    patchkv = PatchKVMiddleware()
    retry = ModelRetryMiddleware(max_retries=2, initial_delay=0.0)
    runner = agent(Fails(messages=iter(looking(4))), patchkv.instrument([retry, clearing()]))
    runner.invoke(GO, THREAD)
    history = patchkv.history_of("t")
    assert middle_edits(history) == [CLEARS] * 3
    assert len(history.log()) == 5


def test_an_interrupted_turn_goes_on_where_it_was() -> None:
    patchkv = PatchKVMiddleware()
    ask = HumanInTheLoopMiddleware(interrupt_on={"look": True})
    runner = agent(saying(looking(3)), patchkv.instrument([ask, clearing()]))
    state = runner.invoke(GO, THREAD)
    for _ in range(3):
        assert "__interrupt__" in state
        resumed = Command(resume={"decisions": [{"type": "approve"}]})
        state = runner.invoke(resumed, THREAD)
    assert state["messages"][-1].text == "done"
    history = patchkv.history_of("t")
    assert middle_edits(history) == [CLEARS] * 2
    assert len(history.log()) == 4


def test_threads_of_two_users_never_mix() -> None:
    store = MemoryHistoryStore()
    patchkv = PatchKVMiddleware(history=store)

    def says(user: str) -> str:
        return f"I am {user}, and nobody else."

    async def both() -> None:
        runners = {
            user: agent(saying(looking(4, then=user)), patchkv.instrument([clearing()]))
            for user in ("ada", "bob")
        }
        await asyncio.gather(
            *(
                runner.ainvoke(
                    {"messages": [HumanMessage(says(user))]},
                    {"configurable": {"thread_id": user}},
                )
                for user, runner in runners.items()
            )
        )

    asyncio.run(both())
    for user, other in (("ada", "bob"), ("bob", "ada")):
        history = patchkv.history_of(user)
        assert middle_edits(history) == [CLEARS] * 3
        assert len(history.log()) == 5
        texts = [message.text for version in history.log() for message in version.messages]
        assert says(user) in texts and says(other) not in texts


def test_runs_without_a_thread_id_are_threads_of_their_own() -> None:
    patchkv = PatchKVMiddleware(history=(store := MemoryHistoryStore()))
    runner = create_agent(
        saying([next(iter(looking(1))), "one", "two"]),
        [look],
        middleware=patchkv.instrument([]),
    )
    for _ in range(2):
        state = runner.invoke(GO)
        assert state.keys() == {"messages"}
    lengths = sorted(len(patchkv.history_of(key.thread).log()) for key in store.threads())
    assert lengths == [1, 2]


def test_versions_outlive_the_middleware(tmp_path: Any) -> None:
    saver = InMemorySaver()
    for turn in range(2):
        with SQLiteHistoryStore(tmp_path / "agent.db") as store:
            patchkv = PatchKVMiddleware(history=store)
            runner = create_agent(
                saying(looking(2 if turn == 0 else 0)),
                [look],
                middleware=patchkv.instrument([clearing()]),
                checkpointer=saver,
            )
            runner.invoke(GO, THREAD)
            assert len(patchkv.history_of("t").log()) == (3 if turn == 0 else 4)
            assert middle_edits(patchkv.history_of("t")) == [CLEARS]


class Suspended:
    """Stands for an engine's thread."""

    def __init__(self, busy: bool = False) -> None:
        self.history = ContextHistory()
        self.times = 0
        self.busy = busy

    def suspend(self) -> None:
        self.times += 1
        if self.busy:
            raise PatchKVError("the thread is answering already")


class Serving(ScriptedModel):
    """Names the thread that answers, as `ChatPatchKV` does."""

    by_user: dict[str, Any] = {}

    def _generate(self, messages: Any, *arguments: Any, **keywords: Any) -> Any:
        served_by(self.by_user[messages[1].text])
        return super()._generate(messages, *arguments, **keywords)


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("busy", [False, True])
def test_the_thread_that_answered_is_suspended_while_tools_run(how: str, busy: bool) -> None:
    threads = {"ada": Suspended(busy), "bob": Suspended(busy)}
    patchkv = PatchKVMiddleware()
    for user, times in (("ada", 3), ("bob", 1)):
        model = Serving(messages=iter(looking(times)), by_user=threads)
        runner = agent(model, patchkv.instrument([clearing()]))
        config = {"configurable": {"thread_id": user}}
        state = run(runner, how, {"messages": [HumanMessage(user)]}, config)
        assert state["messages"][-1].text == "done"
        assert patchkv.history_of(user) is threads[user].history, "the model keeps the versions"
    assert (threads["ada"].times, threads["bob"].times) == (3, 1)


def test_threads_are_left_running_where_that_is_wanted() -> None:
    thread = Suspended()
    model = Serving(messages=iter(looking(2)), by_user={"Go.": thread})
    agent(model, [PatchKVMiddleware(suspend=False)]).invoke(GO, THREAD)
    assert thread.times == 0


def test_a_thread_that_is_gone_is_not_kept_alive() -> None:
    import gc
    import weakref

    thread = Suspended()
    model = Serving(messages=iter(looking(1)), by_user={"Go.": thread})
    patchkv = PatchKVMiddleware()
    agent(model, [patchkv]).invoke(GO, THREAD)
    reference = weakref.ref(thread)
    model.by_user.clear()
    del thread, model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("how", ["sync", "async"])
def test_edits_are_custom_events(how: str) -> None:
    class Listens(BaseCallbackHandler):
        def __init__(self) -> None:
            self.heard: list[tuple[str, Any]] = []

        def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
            self.heard.append((name, data))

    listener = Listens()
    patchkv = PatchKVMiddleware()
    runner = agent(saying(looking(2)), patchkv.instrument([clearing()]))
    run(runner, how, GO, {**THREAD, "callbacks": [listener]})
    edits = [data for name, data in listener.heard if name == "patchkv_edit"]
    assert [edit["kind"] for edit in edits if edit["kind"] != "append"] == ["replace_tool_result"]
    (cleared,) = [edit for edit in edits if edit["kind"] != "append"]
    assert cleared["author"] == "ContextEditingMiddleware"
    assert (cleared["old_indices"], cleared["new_indices"]) == ([3], [3])
    assert "museum" not in str(listener.heard), "no content in events"
