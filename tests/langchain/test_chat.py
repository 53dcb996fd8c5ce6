"""ChatPatchKV: what it says, how it says it, and what it says about it."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import tool
from pydantic import BaseModel, ValidationError

from patchkv_agents import Engine, RecoveryPolicy
from patchkv_agents.errors import InputError
from patchkv_agents.recovery import Window
from patchkv_langchain import ChatPatchKV

from .scripted import ScriptedChat

if TYPE_CHECKING:
    from collections.abc import Iterable


@tool
def get_weather(location: str) -> str:
    """Get the weather at a location."""
    return f"It is sunny in {location}."


@tool
def take_note(text: str) -> str:
    """Write something down."""
    return "noted"


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "%s"}}\n</tool_call>'
RICH = (
    "<think>\nTwo cities.\n</think>\n\nI look both up.\n"
    + CALL % "Bern"
    + "\n"
    + CALL % "Zürich"
    + "\n<tool_call>{broken</tool_call>"
)
THREAD: Any = {"configurable": {"thread_id": "t"}}
PAGE = " ".join(f"Line {number} of the page says nothing new." for number in range(60))


def saying(text: str, engine: Engine, **options: Any) -> Any:
    return ScriptedChat(engine=engine, says=lambda *_: text, max_tokens=400, **options)


def joined(chunks: Iterable[AIMessageChunk]) -> AIMessageChunk:
    full: Any = None
    for chunk in chunks:
        full = chunk if full is None else full + chunk
    return full  # type: ignore[no-any-return]


def said(message: BaseMessage) -> tuple[Any, ...]:
    """All that is said, without what differs between runs."""
    assert isinstance(message, AIMessage)
    calls = [(call["name"], call["args"], call["id"]) for call in message.tool_calls]
    invalid = [call["args"] for call in message.invalid_tool_calls]
    finish = message.response_metadata["finish_reason"]
    return message.content, calls, invalid, message.additional_kwargs, finish


def test_an_answer_is_taken_apart(tiny_chat_engine: Engine) -> None:
    model = saying(RICH, tiny_chat_engine).bind_tools([get_weather])
    content, calls, invalid, additional, finish = said(model.invoke("How is the weather?"))
    assert content == "I look both up.\n<tool_call>{broken</tool_call>"
    assert [call[:2] for call in calls] == [
        ("get_weather", {"location": "Bern"}),
        ("get_weather", {"location": "Zürich"}),
    ]
    assert calls[0][2] != calls[1][2]
    assert invalid == ["<tool_call>{broken</tool_call>"]
    assert additional == {"reasoning_content": "Two cities."}
    assert finish == "tool_calls"


@pytest.mark.parametrize("text", [RICH, "Hello! 🙂 What now?", CALL % "Bern", "  spaced  "])
def test_streams_and_asynchronous_calls_say_the_same(tiny_chat_engine: Engine, text: str) -> None:
    model = saying(text, tiny_chat_engine).bind_tools([get_weather])

    async def stream() -> AIMessageChunk:
        return joined([chunk async for chunk in model.astream("Hi")])

    whole = model.invoke("Hi")
    streamed = joined(model.stream("Hi"))
    assert said(streamed) == said(whole)
    assert said(asyncio.run(model.ainvoke("Hi"))) == said(whole)
    assert said(asyncio.run(stream())) == said(whole)
    for message in (whole, streamed):
        usage = message.usage_metadata
        assert usage is not None
        assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]


def test_text_comes_in_pieces_and_calls_whole(tiny_chat_engine: Engine) -> None:
    model = saying("I look it up.\n" + CALL % "Bern", tiny_chat_engine).bind_tools([get_weather])
    chunks = list(model.stream("Hi"))
    assert len([chunk for chunk in chunks if chunk.content]) > 2
    assert len([chunk for chunk in chunks if chunk.tool_call_chunks]) == 1
    assert [chunk.chunk_position for chunk in chunks[-2:]] == [None, "last"]


def test_what_the_model_reads_again_is_what_it_wrote(chat_engine: Engine) -> None:
    """Broken calls are in the content, and the message lists them too: shown once."""
    model = saying(RICH, chat_engine).bind_tools([get_weather])
    asked = HumanMessage("How is the weather?")
    for answer in (
        model.invoke([asked], config=THREAD),
        joined(model.stream([asked], config=THREAD)),
    ):
        results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in answer.tool_calls]
        model.invoke([asked, answer, *results], config=THREAD)
        [thread] = chat_engine.pool.threads()
        head = thread.history.head
        assert head is not None
        assistant = head.messages[1]
        assert len(assistant.tool_calls) == 2 and assistant.reasoning == "Two cities."
        assert assistant.text.count("{broken") == 1


TWO_CALLS = f"Both.\n{CALL % 'Bern'}\n{CALL % 'Rome'}"


@pytest.mark.parametrize(
    ("arguments", "places"),
    [
        ({"parallel_tool_calls": False}, ["Bern"]),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, ["Bern"]),
        ({"parallel_tool_calls": True}, ["Bern", "Rome"]),
        ({"parallel_tool_calls": None}, ["Bern", "Rome"]),
    ],
)
def test_one_call_at_a_time(
    tiny_chat_engine: Engine, arguments: dict[str, Any], places: list[str]
) -> None:
    """Supervisors and agents bind tools with it; the first call of the model raised."""
    model = saying(TWO_CALLS, tiny_chat_engine).bind_tools([get_weather], **arguments)
    for answer in (model.invoke("Hi"), joined(model.stream("Hi"))):
        assert [call["args"]["location"] for call in answer.tool_calls] == places
        assert answer.content == "Both."


@pytest.mark.parametrize(
    ("choice", "begin"),
    [
        ({"type": "function", "function": {"name": "take_note"}}, "take_note"),
        ({"type": "tool", "name": "take_note"}, "take_note"),
        ({"type": "any"}, "<tool_call>"),
        ("required", "<tool_call>"),
        ({"type": "auto"}, ""),
        ({"type": "none"}, ""),
    ],
)
def test_forms_of_the_choice(tiny_chat_engine: Engine, choice: Any, begin: str) -> None:
    begins = []

    def says(messages: Any, tools: Any, text: str) -> str:
        begins.append(text)
        return text or "Hello."

    model = ScriptedChat(engine=tiny_chat_engine, says=says, max_tokens=40)
    model.bind_tools([get_weather, take_note], tool_choice=choice).invoke("Hi")
    assert begin in begins[0] and bool(begin) == bool(begins[0])


def test_calls_of_several_answers_have_their_own_ids(chat_engine: Engine) -> None:
    model = saying(CALL % "Bern", chat_engine).bind_tools([get_weather])
    first = model.invoke("Hi")
    again = model.invoke("Hi")
    later = model.invoke([HumanMessage("Hi"), first, HumanMessage("And now?")])
    ids = [message.tool_calls[0]["id"] for message in (first, again, later)]
    assert ids[0] == ids[1] != ids[2]


# Edits and what is reported.


def conversation(page: str) -> list[BaseMessage]:
    return [
        SystemMessage("You read pages."),
        HumanMessage("What do the pages say?"),
        AIMessage("", tool_calls=[{"name": "get_weather", "args": {"location": "a"}, "id": "1"}]),
        ToolMessage(page, tool_call_id="1"),
        AIMessage("", tool_calls=[{"name": "get_weather", "args": {"location": "b"}, "id": "2"}]),
        ToolMessage(PAGE, tool_call_id="2"),
        HumanMessage("Sum up."),
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["invoke", "stream"])
def test_an_edit_in_the_middle_is_recovered(chat_engine: Engine, stream: bool) -> None:
    model = ChatPatchKV(engine=chat_engine, policy="default", max_tokens=4)

    def ask(messages: list[BaseMessage]) -> AIMessage:
        if stream:
            return joined(model.stream(messages, config=THREAD))
        return model.invoke(messages, config=THREAD)

    ask(conversation("The old page. " + PAGE))
    answer = ask(conversation("A new one. " + PAGE))
    usage, report = answer.usage_metadata, answer.response_metadata["recovery"]
    assert usage is not None
    details: Any = usage["input_token_details"]
    assert details["recovered"] == report["restored"] > 300
    assert details["cache_read"] == report["cache_read"] > 0
    assert details["recomputed"] > 0
    assert sum(details.values()) + report["new"] == usage["input_tokens"]
    assert answer.response_metadata["model_name"] == "smollm2"
    [thread] = chat_engine.pool.threads()
    version = thread.history.get(answer.response_metadata["context_version"])
    assert [edit.kind.value for edit in version.edits] == ["replace_tool_result"]


def test_the_exact_policy_says_what_a_fresh_engine_says(
    chat_engine: Engine, tiny_chat_engine: Engine
) -> None:
    model = ChatPatchKV(engine=chat_engine, policy=RecoveryPolicy.exact(), max_tokens=12)
    model.invoke(conversation("The old page. " + PAGE), config=THREAD)
    answer = model.invoke(conversation("A new one. " + PAGE), config=THREAD)
    assert answer.response_metadata["recovery"]["is_exact"]
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
    fresh = ChatPatchKV(engine=tiny_chat_engine, thread="fresh", max_tokens=12)
    assert answer.content == fresh.invoke(conversation("A new one. " + PAGE)).content


def test_a_policy_can_be_named_with_a_call(chat_engine: Engine) -> None:
    model = ChatPatchKV(engine=chat_engine, max_tokens=2)
    policies = ["exact", "default", "prefix_cache", RecoveryPolicy.default(), None]
    names = [
        model.invoke("Hi", policy=policy).response_metadata["recovery"]["policy"]
        for policy in policies
    ]
    assert names == ["exact", "patchkv", "prefix_cache", "patchkv", "exact"]
    with pytest.raises(InputError, match="prefix_cache"):
        model.invoke("Hi", policy="no such")
    with pytest.raises(ValidationError, match="RecoveryPolicy"):
        ChatPatchKV(policy=7)


# Arguments.


def test_sampling_arguments_of_the_model_and_of_the_call(tiny_chat_engine: Engine) -> None:
    model = ChatPatchKV(engine=tiny_chat_engine, temperature=5.0, seed=1, max_tokens=12)
    answers = [model.invoke("Hi").content for _ in range(2)]
    assert answers[0] == answers[1] != model.invoke("Hi", seed=2).content
    assert model.invoke("Hi", max_tokens=3).usage_metadata["output_tokens"] == 3
    greedy = {model.invoke("Hi", seed=seed, temperature=0).content for seed in (1, 2)}
    assert len(greedy) == 1
    assert greedy == {model.invoke("Hi", min_p=1.0).content}  # only the likeliest token is left


def test_stop_strings(tiny_chat_engine: Engine) -> None:
    model = saying("One two three", tiny_chat_engine)
    assert model.invoke("Hi", stop=["two"]).content == "One "
    model = saying("One two three", tiny_chat_engine, stop=["thr"])
    assert model.invoke("Hi").content == "One two "
    assert model.invoke("Hi", stop=["One"]).content == ""
    assert joined(model.stream("Hi")).content == "One two "


def test_unknown_arguments_are_refused(tiny_chat_engine: Engine) -> None:
    with pytest.raises(InputError, match="max_token"):
        ChatPatchKV(engine=tiny_chat_engine).invoke("Hi", max_token=7)


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ("any", "get_weather"),
        ("required", "get_weather"),
        (True, "get_weather"),
        ("take_note", "take_note"),
        ({"type": "function", "function": {"name": "take_note"}}, "take_note"),
    ],
)
def test_a_forced_call_begins_as_one(chat_engine: Engine, choice: Any, called: str) -> None:
    """Random weights would never begin so."""
    model = ChatPatchKV(engine=chat_engine, max_tokens=24)
    answer = model.bind_tools([get_weather, take_note], tool_choice=choice).invoke("Hi")
    opening = '<tool_call>\n{"name": "'
    named = f'{called}", "arguments":' if isinstance(choice, dict) or choice == called else ""
    assert answer.content.startswith(opening + named)


def test_tools_are_shown_and_not_called_where_none_is_chosen(tiny_chat_engine: Engine) -> None:
    model = saying(CALL % "Bern", tiny_chat_engine)
    shown = model.bind_tools([get_weather], tool_choice="none").invoke("Hi")
    assert (shown.content, shown.tool_calls) == (CALL % "Bern", [])
    called = model.bind_tools([get_weather], tool_choice="auto").invoke("Hi")
    assert called.usage_metadata["input_tokens"] == shown.usage_metadata["input_tokens"]
    with pytest.raises(InputError, match="get_weather"):
        model.bind_tools([get_weather], tool_choice="get_news")


def test_a_structured_answer_begins_as_json(tiny_chat_engine: Engine) -> None:
    schema = {"title": "Joke", "type": "object", "properties": {"setup": {"type": "string"}}}
    model = ScriptedChat(engine=tiny_chat_engine, max_tokens=60)
    with_schema = model.with_structured_output(schema, method="json_schema", include_raw=True)
    without = model.with_structured_output(schema, method="json_mode", include_raw=True)
    answers = [structured.invoke("A joke, please") for structured in (with_schema, without)]
    assert [sorted(answer["parsed"]) for answer in answers] == 2 * [["punchline", "setup"]]
    long, short = (answer["raw"].usage_metadata["input_tokens"] for answer in answers)
    assert long > short  # the schema is shown
    with pytest.raises(InputError, match="json_mode"):
        model.with_structured_output(schema, method="magic")  # type: ignore[arg-type]


class Joke(BaseModel):
    setup: str


def test_a_structured_answer_that_does_not_fit_is_an_error(tiny_chat_engine: Engine) -> None:
    model = saying("{}", tiny_chat_engine)
    raw = model.with_structured_output(Joke, method="json_mode", include_raw=True)
    assert raw.invoke("A joke, please")["parsing_error"] is not None
    with pytest.raises(OutputParserException, match="setup"):
        model.with_structured_output(Joke, method="json_mode").invoke("A joke, please")


def test_reasoning_can_be_turned_off_by_a_template_argument(
    tiny_chat_engine: Engine,
) -> None:
    model = ChatPatchKV(
        engine=tiny_chat_engine, max_tokens=2, template_args={"enable_thinking": False}
    )
    model.invoke("Hi", thread="arguments")
    [thread] = [t for t in tiny_chat_engine.pool.threads() if t.id == "arguments"]
    assert thread.history.head is not None
    assert thread.history.head.template_args.load() == {"enable_thinking": False}


# Loading.


def test_nothing_is_loaded_before_the_first_call() -> None:
    code = (
        "import sys\n"
        "from patchkv_langchain import ChatPatchKV\n"
        "model = ChatPatchKV(policy='default').bind_tools([])\n"
        "print([m for m in ('torch', 'transformers', 'langchain') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_models_of_the_same_settings_load_one_engine(
    tiny_chat_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[tuple[str, dict[str, Any]]] = []

    class Loaded:
        """Stands for an engine; can be referred to weakly, as engines are."""

    def load(name: str, **options: Any) -> Any:
        loads.append((name, options))
        time.sleep(0.05)
        return Loaded()

    monkeypatch.setattr(Engine, "from_pretrained", load)
    models = [ChatPatchKV(model="some/model", temperature=n / 10) for n in range(4)]
    with ThreadPoolExecutor(8) as pool:
        engines = list(pool.map(lambda model: model.load(), 2 * models))
    assert len({id(engine) for engine in engines}) == 1
    assert loads == [("some/model", {})]
    other = ChatPatchKV(model="some/model", model_kwargs={"dtype": "bfloat16"})
    assert other.load() is not engines[0]
    del engines, models, other
    ChatPatchKV(model="some/model").load()  # nobody uses the first any more
    assert loads == [("some/model", {}), ("some/model", {"dtype": "bfloat16"}), ("some/model", {})]


def test_copies_share_the_engine_and_pickles_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded:
        pass

    monkeypatch.setattr(Engine, "from_pretrained", lambda name, **options: Loaded())
    model = ChatPatchKV(model="another/model", temperature=0.5, policy=RecoveryPolicy.default())
    engine = model.load()
    assert copy.deepcopy(model).load() is engine
    assert model.model_copy().load() is engine
    again = pickle.loads(pickle.dumps(model))
    assert again == ChatPatchKV(
        model="another/model", temperature=0.5, policy=RecoveryPolicy.default()
    )


def test_the_profile_knows_the_context_length(
    tiny_chat_engine: Engine, tiny_model_folder: str
) -> None:
    for model in (
        ChatPatchKV(engine=tiny_chat_engine, max_tokens=96),
        ChatPatchKV(model=tiny_model_folder, max_tokens=96),
    ):
        assert model.profile is not None
        assert model.profile["max_input_tokens"] == 4000
    embedded = ChatPatchKV(max_tokens=192)
    assert embedded.profile is not None and embedded.profile["max_input_tokens"] == 8000
    unknown = ChatPatchKV(model="no/such-model")
    assert unknown.profile is not None and "max_input_tokens" not in unknown.profile


# Asynchronous calls.


def test_a_cancelled_stream_is_closed_and_the_conversation_goes_on(chat_engine: Engine) -> None:
    model = saying("word " * 200, chat_engine)

    async def cancel() -> int:
        seen = 0
        async for _ in model.astream("Hi", config=THREAD):
            seen += 1
            if seen == 3:
                break
        task = asyncio.create_task(model.ainvoke("Hi", config=THREAD))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return seen

    assert asyncio.run(cancel()) == 3
    answer = saying("done", chat_engine).invoke("Hi", config=THREAD)
    assert answer.content == "done"
    for worker in threading.enumerate():
        if worker.name == "patchkv-chat":
            worker.join(5)
            assert not worker.is_alive()


def test_the_event_loop_runs_on_while_the_model_works(tiny_chat_engine: Engine) -> None:
    model = saying("word " * 60, tiny_chat_engine)

    async def both() -> int:
        beats = 0
        task = asyncio.create_task(model.ainvoke("Hi"))
        while not task.done():
            beats += 1
            await asyncio.sleep(0.001)
        return beats

    assert asyncio.run(both()) > 3


def test_errors_of_the_worker_reach_the_caller(tiny_chat_engine: Engine) -> None:
    model = ChatPatchKV(engine=tiny_chat_engine)
    with pytest.raises(InputError, match="unknown arguments"):
        asyncio.run(model.ainvoke("Hi", nonsense=1))


def test_the_embedded_model_recovers_and_answers(embedded_chat_engine: Engine) -> None:
    model = ChatPatchKV(engine=embedded_chat_engine, max_tokens=6)
    short = RecoveryPolicy("short", Window(32, tail_tokens=32, block_size=32))

    def ask(hours: str, policy: RecoveryPolicy) -> Any:
        page = f"Opening hours: {hours}. " + "The rest of the page is of no interest. " * 20
        config: Any = {"configurable": {"thread_id": f"hours-{policy.name}"}}
        return model.invoke(f"{page}\nHello! How are you?", config=config, policy=policy)

    ask("nine to five", short)
    recovered, exact = ask("ten to six", short), ask("ten to six", RecoveryPolicy.exact())
    assert recovered.usage_metadata["input_token_details"]["recovered"] > 0
    assert recovered.content == exact.content and str(exact.content).strip()
