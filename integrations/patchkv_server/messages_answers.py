"""Answers in the form of Anthropic's Messages API."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from patchkv_agents.context import ToolCall
from patchkv_agents.context.answers import AnswerPiece
from patchkv_server.answers import Answered, Piece, recovery_record, sse
from patchkv_server.errors import ApiError

if TYPE_CHECKING:
    from patchkv_agents.engine.reply import Reply

_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class MessagesWriter:
    """Writes one answer as a message.

    Args:
        model: as the client called it.
        tokenizer: of the model.
        stop: its stop sequences.
        applied_edits: that the server made; None where none were asked for.
    """

    keep_alive = sse({"type": "ping"}, "ping")

    def __init__(
        self,
        model: str,
        tokenizer: Any,
        *,
        stop: Sequence[str],
        applied_edits: Sequence[dict[str, Any]] | None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._stop = stop
        self._context = None if applied_edits is None else {"applied_edits": [*applied_edits]}
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks = 0
        self._open: str | None = None  # type of the block that is being written

    def whole(self, answered: Answered) -> dict[str, Any]:
        """As `AnswerWriter.whole`."""
        answer = answered.answer
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.content:
            content.append({"type": "text", "text": answer.content})
        content += [_tool_use(call, call.parsed_arguments()) for call in answer.calls]
        ended = {**self._ended(answered), "usage": _usage(answered)}
        return {**self._message(content), **ended, "recovery": recovery_record(answered)}

    def start(self) -> Iterator[bytes]:
        """As `AnswerWriter.start`."""
        # What the prompt takes is known at the end only: the first event must not wait for that.
        empty = {"input_tokens": 0, "output_tokens": 0, **_NO_CACHE}
        message = {**self._message([]), "usage": empty}
        yield sse({"type": "message_start", "message": message}, "message_start")

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """As `AnswerWriter.piece`."""
        for part in piece.parts:
            yield from self._part(part)

    def end(self, answered: Answered) -> Iterator[bytes]:
        """As `AnswerWriter.end`."""
        yield from self._close()
        ended = self._ended(answered)
        delta = {
            "type": "message_delta",
            "delta": {name: ended[name] for name in ("stop_reason", "stop_sequence")},
            "usage": _usage(answered),
            "recovery": recovery_record(answered),
        }
        if self._context is not None:
            delta["context_management"] = self._context
        yield sse(delta, "message_delta")
        yield sse({"type": "message_stop"}, "message_stop")

    def error(self, error: ApiError) -> bytes:
        """As `AnswerWriter.error`."""
        return sse(error.anthropic_body(), "error")

    def _part(self, part: AnswerPiece) -> Iterator[bytes]:
        if part.reasoning:
            yield from self._begin("thinking", {"thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": part.reasoning})
        if part.content:
            yield from self._begin("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": part.content})
        if part.call is not None:
            yield from self._close()
            yield from self._begin("tool_use", _tool_use(part.call, {}))
            yield self._delta(
                {"type": "input_json_delta", "partial_json": part.call.arguments_json}
            )
            yield from self._close()

    def _begin(self, kind: str, fields: dict[str, Any]) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        block = {"type": kind, **fields}
        event = {"type": "content_block_start", "index": self._blocks, "content_block": block}
        yield sse(event, "content_block_start")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._blocks, "delta": delta}
        return sse(event, "content_block_delta")

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield sse({"type": "content_block_stop", "index": self._blocks}, "content_block_stop")
            self._blocks += 1
            self._open = None

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _ended(self, answered: Answered) -> dict[str, Any]:
        reply = answered.reply
        reason, sequence = _REASONS[reply.finish_reason], self._stop_sequence(reply)
        if reply.finish_reason == "stop" and answered.answer.calls:
            reason = "tool_use"
        elif sequence is not None:
            reason = "stop_sequence"
        ended: dict[str, Any] = {"stop_reason": reason, "stop_sequence": sequence}
        return ended if self._context is None else {**ended, "context_management": self._context}

    def _stop_sequence(self, reply: Reply) -> str | None:
        """The stop sequence that ended the answer, if one did."""
        if not self._stop or reply.finish_reason != "stop":
            return None
        text = str(self._tokenizer.decode(reply.token_ids, clean_up_tokenization_spaces=False))
        places = [(text.find(stop), stop) for stop in self._stop if stop and stop in text]
        return min(places)[1] if places else None


_NO_CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _tool_use(call: ToolCall, arguments: Any) -> dict[str, Any]:
    shown = arguments if isinstance(arguments, dict) else {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": shown}


def _usage(answered: Answered) -> dict[str, Any]:
    """Tokens: `cache_read_input_tokens` counts rows that were reused exactly and no others."""
    report, output = answered.reply.report, len(answered.reply.token_ids)
    return {
        "input_tokens": report.tokens - report.cache_read,
        **_NO_CACHE,
        "cache_read_input_tokens": report.cache_read,
        "output_tokens": output,
    }
