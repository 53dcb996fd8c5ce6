"""Answers, recoveries and edits as OpenTelemetry spans. Needs `opentelemetry-api`.

A span per call, from its beginning to the last token, by the conventions for generative AI
(open-telemetry/semantic-conventions-genai, v0.1.0, in development), kind INTERNAL since the model
runs in this process. In it an event `patchkv.edit` per edit that led to the context, and an event
`patchkv.first_token` unless the call failed before it.

| attribute | what it is |
| --- | --- |
| gen_ai.* | operation, model, conversation, request, finish reason, tokens |
| gen_ai.usage.cache_read.input_tokens | prompt tokens reused exactly, and no others |
| patchkv.version, patchkv.resumed_from | ids of context versions |
| patchkv.policy, patchkv.is_exact, patchkv.fallback_reason | how the state was obtained |
| patchkv.tokens.prefix, .new, .window, .attention, .tail, .restored | prompt tokens by label |
| patchkv.recompute_ratio, patchkv.repair_ratio, patchkv.payload_bytes | how much it took |
| patchkv.ttft_ms, .resume_ttft_ms, .render_ms, ... | milliseconds, as in `RecoveryReport` |

Of an edit: kind, author, indices of messages, scope, place, and whether it was declared, is partial
or says forget. No text of messages, tools or metadata is exported, unless `content` is set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from patchkv_agents.errors import InputError
from patchkv_agents.records import edit_record

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from patchkv_agents.context import Edit, Message
    from patchkv_agents.engine.outcomes import AnsweredCall, CallOutcome, Observer
    from patchkv_agents.recovery.report import RecoveryReport

_LABELS = ("prefix", "new", "window", "attention", "tail", "deviation", "restored")
_MEASURES = (
    "recompute_ratio",
    "repair_ratio",
    "payload_bytes",
    "ttft_ms",
    "render_ms",
    "wait_ms",
    "history_ms",
    "fetch_ms",
    "planning_ms",
    "restore_ms",
    "recompute_ms",
    "sampling_ms",
    "resume_ttft_ms",
)


def telemetry(*, content: bool = False, tracer_provider: TracerProvider | None = None) -> Observer:
    """An observer for `Engine(observer=...)` that makes spans.

    Args:
        content: also export what the messages say: `gen_ai.input.messages`,
            `gen_ai.output.messages`, the metadata of edits and their new text.
        tracer_provider: makes the tracer; the global one if left out.

    Raises:
        InputError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise InputError(
            "telemetry needs OpenTelemetry: pip install 'patchkv-agents[telemetry]'"
        ) from error
    from patchkv_agents import __version__
    from patchkv_agents.engine.outcomes import FailedCall

    tracer = trace.get_tracer("patchkv_agents", __version__, tracer_provider)

    def observe(outcome: CallOutcome) -> None:
        span = tracer.start_span(
            f"chat {outcome.model}",
            kind=trace.SpanKind.INTERNAL,
            start_time=outcome.started_ns,
            attributes=_attributes(outcome, content),
        )
        if not isinstance(outcome, FailedCall):
            span.set_attributes(_answer_attributes(outcome, content))
        for edit in outcome.edits:
            span.add_event(
                "patchkv.edit",
                _edit_attributes(edit, outcome, content),
                timestamp=outcome.started_ns,
            )
        if not isinstance(outcome, FailedCall):
            after_ns = int(outcome.report.ttft_ms * 1e6)
            span.add_event("patchkv.first_token", timestamp=outcome.started_ns + after_ns)
        if outcome.error is not None:
            span.set_attribute("error.type", type(outcome.error).__qualname__)
            span.set_status(trace.StatusCode.ERROR)
        span.end(outcome.ended_ns)

    return observe


def _attributes(outcome: CallOutcome, content: bool) -> dict[str, Any]:
    params = outcome.params
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "patchkv",
        "gen_ai.conversation.id": outcome.thread.thread,
        "gen_ai.request.model": outcome.model,
        "gen_ai.request.max_tokens": params.max_new_tokens,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
    }
    if outcome.thread.namespace:
        attributes["patchkv.namespace"] = outcome.thread.namespace
    if outcome.version is not None:
        attributes["patchkv.version"] = outcome.version.id
        if content:
            messages = [_message(message) for message in outcome.version.messages]
            attributes["gen_ai.input.messages"] = json.dumps(messages)
    if params.top_k:
        attributes["gen_ai.request.top_k"] = params.top_k
    if params.seed is not None:
        attributes["gen_ai.request.seed"] = params.seed
    return attributes


def _answer_attributes(answered: AnsweredCall, content: bool) -> dict[str, Any]:
    reply, report = answered.reply, answered.report
    attributes: dict[str, Any] = {
        "gen_ai.response.model": answered.model,
        "gen_ai.usage.input_tokens": report.tokens,
        "gen_ai.usage.cache_read.input_tokens": report.cache_read,
        **_report_attributes(report),
    }
    if reply is not None:
        attributes["gen_ai.response.finish_reasons"] = [reply.finish_reason]
        attributes["gen_ai.usage.output_tokens"] = len(reply.token_ids)
        if content:
            said = {"role": "assistant", "parts": [_text(reply.text)]}
            said["finish_reason"] = reply.finish_reason
            attributes["gen_ai.output.messages"] = json.dumps([said])
    return attributes


def _report_attributes(report: RecoveryReport) -> Mapping[str, Any]:
    attributes: dict[str, Any] = {
        "patchkv.policy": report.policy,
        "patchkv.is_exact": report.is_exact,
        **{f"patchkv.tokens.{label}": getattr(report, label) for label in _LABELS},
        **{f"patchkv.{name}": getattr(report, name) for name in _MEASURES},
    }
    if report.resumed_from is not None:
        attributes["patchkv.resumed_from"] = report.resumed_from
    if report.fallback_reason is not None:
        attributes["patchkv.fallback_reason"] = report.fallback_reason
    return attributes


def _edit_attributes(edit: Edit, outcome: CallOutcome, content: bool) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        f"patchkv.edit.{name}": value
        for name, value in edit_record(edit).items()
        if name != "id" and value is not None  # attributes cannot be None
    }
    if content and outcome.version is not None:
        messages = outcome.version.messages
        attributes["patchkv.edit.metadata"] = edit.metadata.text
        attributes["patchkv.edit.text"] = [messages[j].text for j in edit.new_indices]
    return attributes


def _message(message: Message) -> dict[str, Any]:
    """A message in the form of the conventions: a role, and parts."""
    if message.role == "tool":
        answer = {
            "type": "tool_call_response",
            "id": message.tool_call_id,
            "response": message.text,
        }
        return {"role": "tool", "parts": [answer]}
    parts: list[dict[str, Any]] = []
    if message.reasoning:
        parts.append({"type": "reasoning", "content": message.reasoning})
    if message.text:
        parts.append(_text(message.text))
    parts += (
        {
            "type": "tool_call",
            "id": call.id,
            "name": call.name,
            "arguments": call.parsed_arguments(),
        }
        for call in message.tool_calls
    )
    return {"role": message.role, "parts": parts}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text}
