from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from transformers import PreTrainedTokenizerBase

from patchkv_agents import Edit, EditKind, Engine, RecoveryPolicy
from patchkv_agents.recovery import Window
from patchkv_agents.telemetry import telemetry
from tests.engine.models import tiny_engine

SECRET = "the pin is 7316-22-oak"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You guide visitors of a museum."},
    {"role": "user", "content": f"What is in room 4, and {SECRET}?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "name": "room", "args": {"said": SECRET}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": f"Clocks, as {SECRET}. " * 8},
    {"role": "user", "content": f"And in room 5? Remember, {SECRET}. " * 8},
]
SHORT = RecoveryPolicy("short", Window(8, tail_tokens=4, block_size=8))


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    yield exporter
    exporter.shutdown()


def engine_with(
    tokenizer: PreTrainedTokenizerBase, exporter: InMemorySpanExporter, **options: Any
) -> Engine:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = tiny_engine(tokenizer, max_tokens=700)
    engine.observer = telemetry(tracer_provider=provider, **options)
    return engine


def answered_twice(engine: Engine) -> None:
    thread = engine.thread("visit", namespace="guide")
    thread.generate(MESSAGES, max_new_tokens=3)
    thread.suspend()
    messages = [dict(message) for message in MESSAGES]
    messages[3]["content"] = f"Maps, as {SECRET}. " * 8
    refresh = Edit.declare(
        EditKind.REFRESH_EVIDENCE,
        tool_call_ids=["call_1"],
        author="refresh",
        metadata={"because": SECRET},
    )
    thread.generate(messages, edits=[refresh], policy=SHORT, max_new_tokens=3, seed=7)


def whole(span: ReadableSpan) -> str:
    return span.to_json() + repr([dict(event.attributes or {}) for event in span.events])


def test_a_span_per_answer_and_an_event_per_edit(
    smollm2_tokenizer: PreTrainedTokenizerBase, exporter: InMemorySpanExporter
) -> None:
    engine = engine_with(smollm2_tokenizer, exporter)
    answered_twice(engine)
    first, second = exporter.get_finished_spans()
    thread = engine.thread("visit", namespace="guide")
    attributes = dict(second.attributes or {})
    assert second.name == "chat LlamaForCausalLM" and second.kind is SpanKind.INTERNAL
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.conversation.id"] == "visit"
    assert attributes["patchkv.namespace"] == "guide"
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.request.seed"] == 7
    assert attributes["patchkv.version"] == thread.history.head.id
    assert attributes["patchkv.resumed_from"] == (first.attributes or {})["patchkv.version"]
    assert attributes["patchkv.policy"] == "short" and not attributes["patchkv.is_exact"]
    labels = ("prefix", "new", "window", "attention", "tail", "restored")
    counts = [attributes[f"patchkv.tokens.{label}"] for label in labels]
    assert sum(counts) == attributes["gen_ai.usage.input_tokens"]
    assert attributes["gen_ai.usage.cache_read.input_tokens"] <= counts[0]
    edit, token = second.events
    assert (edit.name, token.name) == ("patchkv.edit", "patchkv.first_token")
    assert dict(edit.attributes or {}) == {
        "patchkv.edit.kind": "refresh_evidence",
        "patchkv.edit.author": "refresh",
        "patchkv.edit.old_indices": (3,),
        "patchkv.edit.new_indices": (3,),
        "patchkv.edit.scope": "messages",
        "patchkv.edit.where": "state",
        "patchkv.edit.declared": True,
        "patchkv.edit.partial": thread.history.head.edits[0].partial,
        "patchkv.edit.forget": False,
    }
    assert second.start_time < token.timestamp <= second.end_time
    assert [event.name for event in first.events] == ["patchkv.first_token"]


def test_content_is_not_exported_unless_asked_for(
    smollm2_tokenizer: PreTrainedTokenizerBase, exporter: InMemorySpanExporter
) -> None:
    answered_twice(engine_with(smollm2_tokenizer, exporter))
    spans = exporter.get_finished_spans()
    assert len(spans) == 2
    for span in spans:
        assert "7316-22" not in whole(span) and "museum" not in whole(span)


def test_content_in_the_conventions_form(
    smollm2_tokenizer: PreTrainedTokenizerBase, exporter: InMemorySpanExporter
) -> None:
    answered_twice(engine_with(smollm2_tokenizer, exporter, content=True))
    _, second = exporter.get_finished_spans()
    attributes = dict(second.attributes or {})
    shown = json.loads(str(attributes["gen_ai.input.messages"]))
    assert [message["role"] for message in shown] == [each["role"] for each in MESSAGES]
    assert shown[0]["parts"] == [{"type": "text", "content": MESSAGES[0]["content"]}]
    assert shown[2]["parts"] == [
        {"type": "tool_call", "id": "call_1", "name": "room", "arguments": {"said": SECRET}}
    ]
    assert shown[3]["parts"][0]["type"] == "tool_call_response"
    assert shown[3]["parts"][0]["id"] == "call_1"
    (said,) = json.loads(str(attributes["gen_ai.output.messages"]))
    assert (said["role"], said["finish_reason"]) == ("assistant", "length")
    edit = dict(second.events[0].attributes or {})
    assert edit["patchkv.edit.text"] == (f"Maps, as {SECRET}. " * 8,)
    assert json.loads(str(edit["patchkv.edit.metadata"])) == {"because": SECRET}


def test_the_same_context_asked_again_repeats_no_edit(
    smollm2_tokenizer: PreTrainedTokenizerBase, exporter: InMemorySpanExporter
) -> None:
    thread = engine_with(smollm2_tokenizer, exporter).thread("visit")
    thread.generate(MESSAGES[:2], max_new_tokens=1)
    for _ in range(2):
        thread.generate([*MESSAGES[:1], MESSAGES[4]], max_new_tokens=1)
    names = [[event.name for event in span.events] for span in exporter.get_finished_spans()]
    assert [events.count("patchkv.edit") for events in names] == [0, 1, 0]


def test_a_closed_stream_and_an_error_end_their_spans(
    smollm2_tokenizer: PreTrainedTokenizerBase,
    exporter: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_with(smollm2_tokenizer, exporter)
    thread = engine.thread("visit")
    stream = thread.stream(MESSAGES, max_new_tokens=30)
    next(stream)
    stream.close()

    def fails(token: int) -> Any:
        raise MemoryError("no room for another row")

    monkeypatch.setattr(thread.sequence, "append", fails)
    with pytest.raises(MemoryError):
        thread.generate(MESSAGES, max_new_tokens=30)
    closed, failed = exporter.get_finished_spans()
    assert "gen_ai.response.finish_reasons" not in (closed.attributes or {})
    assert closed.status.status_code is StatusCode.UNSET
    assert failed.status.status_code is StatusCode.ERROR
    assert (failed.attributes or {})["error.type"] == "MemoryError"


@pytest.mark.parametrize("place", ["the commit", "the prefill"])
def test_a_call_that_fails_before_its_first_token_has_a_span(
    smollm2_tokenizer: PreTrainedTokenizerBase,
    exporter: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    """Observers, spans and metrics used to hear of calls only from their first token on."""
    engine = engine_with(smollm2_tokenizer, exporter)
    thread = engine.thread("visit")
    thread.generate(MESSAGES, max_new_tokens=1)

    def fails(*args: Any, **options: Any) -> Any:
        raise MemoryError("no room for a prefill")

    if place == "the commit":
        monkeypatch.setattr(thread.history, "commit", fails)
    else:
        monkeypatch.setattr(engine.adapter.model, "forward", fails)
    with pytest.raises(MemoryError):
        thread.generate([*MESSAGES, {"role": "user", "content": SECRET}], max_new_tokens=1)
    _, failed = exporter.get_finished_spans()
    attributes = dict(failed.attributes or {})
    assert failed.status.status_code is StatusCode.ERROR
    assert attributes["error.type"] == "MemoryError"
    assert attributes["gen_ai.conversation.id"] == "visit"
    assert ("patchkv.version" in attributes) == (place == "the prefill")
    assert [event.name for event in failed.events] == (
        ["patchkv.edit"] if place == "the prefill" else []
    )


def test_an_observer_that_fails_does_not_harm_the_answer(
    smollm2_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine(smollm2_tokenizer, max_tokens=700)

    def broken(answered: Any) -> None:
        raise RuntimeError("the collector is away")

    engine.observer = broken
    with caplog.at_level(logging.ERROR):
        assert engine.thread("visit").generate(MESSAGES, max_new_tokens=2).token_ids
    assert "observer failed" in caplog.text


def test_without_opentelemetry_the_mend_is_named() -> None:
    program = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "import patchkv_agents.telemetry as t\n"
        "try: t.telemetry()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("InputError") and "patchkv-agents[telemetry]" in done.stdout
