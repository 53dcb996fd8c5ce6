"""Answers in the form of OpenAI's Responses API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from patchkv_agents.context import ToolCall
from patchkv_agents.context.answers import AnswerPiece
from patchkv_server.answers import Answered, Piece, recovery_record, sse
from patchkv_server.errors import ApiError
from patchkv_server.responses_requests import ResponsesBody

Keep = Callable[[dict[str, Any], Answered], None]
"""Called with the whole response, and what the engine answered."""


class ResponsesWriter:
    """Writes one answer as a response.

    Args:
        response_id: of the response.
        model: as the client calls it.
        body: of the request.
        keep: is given the whole response.
    """

    keep_alive = b": still there\n\n"

    def __init__(self, response_id: str, model: str, body: ResponsesBody, keep: Keep) -> None:
        self._id = response_id
        self._model = model
        self._body = body
        self._keep = keep
        self._offered = body.offered
        self._created = int(time.time())
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item that is being written
        self._text = ""  # of it

    def whole(self, answered: Answered) -> dict[str, Any]:
        """As `AnswerWriter.whole`."""
        answer = answered.answer
        texts = (("reasoning", answer.reasoning), ("message", answer.content))
        self._output = [
            *(_item(kind, text) for kind, text in texts if text),
            *(self._call(call) for call in answer.calls),
        ]
        return self._finished(answered)

    def start(self) -> Iterator[bytes]:
        """As `AnswerWriter.start`."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """As `AnswerWriter.piece`."""
        for part in piece.parts:
            yield from self._part(part)

    def end(self, answered: Answered) -> Iterator[bytes]:
        """As `AnswerWriter.end`."""
        yield from self._close()
        response = self._finished(answered)
        yield self._event(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> bytes:
        """As `AnswerWriter.error`."""
        failed = {**self._response("failed"), "error": {"code": "server_error"}}
        failed["error"]["message"] = error.message
        return self._event("response.failed", response=failed)

    def _part(self, part: AnswerPiece) -> Iterator[bytes]:
        if part.reasoning:
            yield from self._begin("reasoning")
            yield self._delta("response.reasoning_text.delta", part.reasoning)
        if part.content:
            yield from self._begin("message")
            yield self._delta("response.output_text.delta", part.content, logprobs=[])
        if part.call is not None:
            yield from self._close()
            item = self._call(part.call)
            field = "input" if item["type"] == "custom_tool_call" else "arguments"
            name = "custom_tool_call_input" if field == "input" else "function_call_arguments"
            place = {"item_id": item["id"], "output_index": len(self._output)}
            begun = {**item, field: "", "status": "in_progress"}
            yield self._event(
                "response.output_item.added", item=begun, output_index=len(self._output)
            )
            yield self._event(f"response.{name}.delta", delta=item[field], **place)
            more = (
                {field: item[field]}
                if field == "input"
                else {field: item[field], "name": item["name"]}
            )
            yield self._event(f"response.{name}.done", **more, **place)
            yield from self._done(item)

    def _begin(self, kind: str) -> Iterator[bytes]:
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._close()
        self._open, self._text = _item(kind, ""), ""
        item = {**self._open, "content": [], "status": "in_progress"}
        yield self._event("response.output_item.added", item=item, output_index=len(self._output))
        part = self._open["content"][0]
        yield self._event("response.content_part.added", part=part, **self._place())

    def _delta(self, kind: str, text: str, **more: Any) -> bytes:
        self._text += text
        return self._event(kind, delta=text, **more, **self._place())

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        item, self._open = self._open, None
        item["content"][0]["text"] = self._text
        place = {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}
        if item["type"] == "message":
            yield self._event("response.output_text.done", text=self._text, logprobs=[], **place)
        else:
            yield self._event("response.reasoning_text.done", text=self._text, **place)
        yield self._event("response.content_part.done", part=item["content"][0], **place)
        yield from self._done(item)

    def _done(self, item: dict[str, Any]) -> Iterator[bytes]:
        yield self._event("response.output_item.done", item=item, output_index=len(self._output))
        self._output.append(item)

    def _place(self) -> dict[str, Any]:
        item = self._open or {}
        return {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return sse(event, kind)

    def _call(self, call: ToolCall) -> dict[str, Any]:
        offered = self._offered.get(call.name)
        item = {"call_id": call.id, "name": call.name, "status": "completed"}
        if offered is not None:
            item["name"] = str(offered.tool.name)
        if offered is not None and offered.namespace is not None:
            item["namespace"] = offered.namespace
        if offered is not None and offered.tool.type == "custom":
            arguments = call.parsed_arguments()
            text = arguments.get("input") if isinstance(arguments, dict) else None
            given = text if isinstance(text, str) else call.arguments_json
            return {"type": "custom_tool_call", "id": _id("ctc"), **item, "input": given}
        fields = {"type": "function_call", "id": _id("fc"), **item}
        return {**fields, "arguments": call.arguments_json}

    def _finished(self, answered: Answered) -> dict[str, Any]:
        report, output = answered.reply.report, len(answered.reply.token_ids)
        is_cut = answered.reply.finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        response["usage"] = {
            "input_tokens": report.tokens,
            "input_tokens_details": {"cached_tokens": report.cache_read, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": report.tokens + output,
        }
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        recovery = recovery_record(answered)
        response["recovery"] = {**recovery, "notes": [*recovery["notes"], *self._body.hosted]}
        self._keep(response, answered)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self._output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None},
            "store": body.store is not False,
            "temperature": 0.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }


def _item(kind: str, text: str) -> dict[str, Any]:
    """An item of reasoning, or a message."""
    if kind == "reasoning":
        content: dict[str, Any] = {"type": "reasoning_text", "text": text}
        item: dict[str, Any] = {"type": kind, "id": _id("rs"), "summary": []}
    else:
        content = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        item = {"type": kind, "id": _id("msg"), "role": "assistant"}
    return {**item, "content": [content], "status": "completed"}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
