"""Agents over the real engine: tiny random weights, scripted answers."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ClearToolUsesEdit, ContextEditingMiddleware
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from transformers import PreTrainedTokenizerBase

from patchkv_agents import Engine
from patchkv_agents.engine import Thread
from patchkv_agents.errors import InputError
from patchkv_langchain import PatchKVMiddleware, ScriptedChatPatchKV
from tests.engine.models import tiny_engine
from tests.langchain.agents import SHORT, look, middle_edits


@pytest.fixture
def engine(smollm2_tokenizer: PreTrainedTokenizerBase) -> Engine:
    return tiny_engine(smollm2_tokenizer, max_tokens=2000)


def looking(times: int) -> list[AIMessage | str]:
    calls = [{"id": "c", "name": "look", "args": {"place": f"room {n}"}} for n in range(times)]
    return [*(AIMessage("", tool_calls=[call]) for call in calls), "The clocks are in room 2."]


def the_thread(engine: Engine) -> Thread:
    (thread,) = engine.pool.threads()
    return thread


@pytest.mark.parametrize("how", ["sync", "async"])
def test_an_agents_edits_are_recovered_with_kind_and_author(engine: Engine, how: str) -> None:
    class Listens(BaseCallbackHandler):
        def __init__(self) -> None:
            self.heard: list[tuple[str, Any]] = []

        def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
            self.heard.append((name, data))

    listener, live = Listens(), []

    class Watched(PatchKVMiddleware):
        def _suspend(self, request: Any) -> None:
            live.append(the_thread(engine).sequence.is_live)
            super()._suspend(request)
            live.append(the_thread(engine).sequence.is_live)

    patchkv = Watched()
    model = ScriptedChatPatchKV(engine=engine, answers=looking(3), policy=SHORT)
    clear = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=10, keep=1)])
    runner = create_agent(
        model,
        [look],
        middleware=patchkv.instrument([clear]),
        checkpointer=InMemorySaver(),
        system_prompt="You guide visitors.",
    )
    given: Any = {"messages": [HumanMessage("Where are the clocks?")]}
    config: Any = {"configurable": {"thread_id": "visit"}, "callbacks": [listener]}
    if how == "sync":
        state = runner.invoke(given, config)
    else:
        state = asyncio.run(runner.ainvoke(given, config))
    said = [message for message in state["messages"] if message.type == "ai"]
    assert said[-1].text == "The clocks are in room 2."
    assert [message.tool_calls[0]["args"] for message in said[:-1]] == [
        {"place": f"room {number}"} for number in range(3)
    ]
    clears = ("replace_tool_result", "ContextEditingMiddleware", "request")
    assert middle_edits(the_thread(engine).history) == [clears, clears]
    assert live == [True, False] * 3
    for message in said[2:]:
        report = message.response_metadata["recovery"]
        assert report["restored"] > 0 and report["resumed_from"]
    events = [name for name, _ in listener.heard]
    assert events.count("patchkv_recovery") == 4
    kinds = [data["kind"] for name, data in listener.heard if name == "patchkv_edit"]
    assert kinds.count("replace_tool_result") == 2


def test_exact_recovery_in_an_agent_gives_a_full_prefills_logits(engine: Engine) -> None:
    model = ScriptedChatPatchKV(engine=engine, answers=looking(3), policy="exact")
    clear = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=10, keep=1)])
    runner = create_agent(model, [look], middleware=PatchKVMiddleware().instrument([clear]))
    state = runner.invoke({"messages": [HumanMessage("Where are the clocks?")]})
    last = state["messages"][-1]
    thread = the_thread(engine)
    version = thread.history.get(last.response_metadata["context_version"])
    resumed = thread.generate(version.messages, tools=version.tools, max_new_tokens=1)
    fresh = engine.thread("fresh").generate(version.messages, tools=version.tools, max_new_tokens=1)
    assert last.response_metadata["recovery"]["is_exact"]
    assert (resumed.first_logits - fresh.first_logits).abs().max() < 1e-4


def test_a_script_that_is_too_short_says_so(engine: Engine) -> None:
    model = ScriptedChatPatchKV(engine=engine, answers=["Hello."])
    assert model.invoke("Hi.").text == "Hello."
    with pytest.raises(InputError, match="has 1 answers"):
        model.invoke("Hi.")


CALL = AIMessage("", tool_calls=[{"id": "c", "name": "look", "args": {"place": "room 1"}}])


def test_a_message_can_be_scripted_behind_content_in_parts(engine: Engine) -> None:
    """Such as the system message that `TodoListMiddleware` makes."""
    model = ScriptedChatPatchKV(engine=engine, answers=[CALL]).bind_tools([look])
    system = SystemMessage([{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Go."}])
    answer = model.invoke([system, HumanMessage("Where are the clocks?")])
    assert [call["args"] for call in answer.tool_calls] == [{"place": "room 1"}]


def test_a_template_that_leaves_out_scripted_calls_is_an_error(
    smollm2_tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer = copy.deepcopy(smollm2_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    engine = tiny_engine(tokenizer, max_tokens=500)
    model = ScriptedChatPatchKV(engine=engine, answers=[CALL])
    with pytest.raises(InputError, match="without its calls"):
        model.invoke("Where are the clocks?")


def test_the_model_that_is_called_by_name_writes_with_its_own_template(
    engine: Engine, smollm2_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The tokens were those of the model's own vocabulary, whichever model was called."""
    tokenizer = copy.deepcopy(smollm2_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }} (as told)<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    model = ScriptedChatPatchKV(engine=engine, answers=[AIMessage("Here.")])
    model._engines["other"] = tiny_engine(tokenizer, max_tokens=500)
    assert model.invoke("Where?", model="other").content == "Here. (as told)"
