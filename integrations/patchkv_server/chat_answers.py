"""Answers as OpenAI's chat completions and completions."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from patchkv_agents.context import ToolCall
from patchkv_server.answers import Answered, Piece, recovery_record, sse
from patchkv_server.errors import ApiError

if TYPE_CHECKING:
    from patchkv_agents.engine.reply import Reply
    from patchkv_agents.engine.sampler import TokenLogprob

_DONE = b"data: [DONE]\n\n"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class _Writer:
    """What both have in common.

    Args:
        model: as the client calls it.
        include_usage: a stream ends with the usage.
    """

    keep_alive = b": still there\n\n"

    def __init__(self, model: str, *, prefix: str, include_usage: bool) -> None:
        self._model = model
        self._include_usage = include_usage
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def error(self, error: ApiError) -> bytes:
        """As `AnswerWriter.error`."""
        return sse(error.body())

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": None,
        }

    def _last(self, finish: dict[str, Any], answered: Answered) -> Iterator[bytes]:
        """The last chunk; it has the report, and usage comes behind it if wanted."""
        recovery = {"recovery": recovery_record(answered)}
        if not self._include_usage:
            yield sse(finish | recovery)
        else:
            yield sse(finish)
            usage = {"choices": [], "usage": _usage(answered.reply)}
            yield sse(self._head(finish["object"]) | usage | recovery)
        yield _DONE


class TextWriter(_Writer):
    """Writes one answer as a completion of a text."""

    def __init__(self, model: str, *, include_usage: bool) -> None:
        super().__init__(model, prefix="cmpl", include_usage=include_usage)

    def whole(self, answered: Answered) -> dict[str, Any]:
        """As `AnswerWriter.whole`."""
        reply = answered.reply
        return {
            **self._chunk(reply.text, reply.finish_reason),
            "usage": _usage(reply),
            "recovery": recovery_record(answered),
        }

    def start(self) -> Iterator[bytes]:
        """As `AnswerWriter.start`."""
        yield from ()

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """As `AnswerWriter.piece`."""
        text = "".join(part.content for part in piece.parts)
        if text:
            yield sse(self._chunk(text, None))

    def end(self, answered: Answered) -> Iterator[bytes]:
        """As `AnswerWriter.end`."""
        yield from self._last(self._chunk("", answered.reply.finish_reason), answered)

    def _chunk(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head("text_completion"), "choices": [choice]}


class ChatWriter(_Writer):
    """Writes one answer as a chat completion.

    Args:
        model: as the client calls it.
        tokenizer: of the model.
        include_usage: a stream ends with the usage.
        with_logprobs: they were asked for.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Any,
        *,
        include_usage: bool,
        with_logprobs: bool,
    ) -> None:
        super().__init__(model, prefix="chatcmpl", include_usage=include_usage)
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._calls = 0

    def whole(self, answered: Answered) -> dict[str, Any]:
        """As `AnswerWriter.whole`."""
        answer = answered.answer
        calls = answer.calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content if answer.content or not calls else None,
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(answered.reply.logprobs or ()),
            "finish_reason": _finish_reason(answered),
        }
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": _usage(answered.reply),
            "recovery": recovery_record(answered),
        }

    def start(self) -> Iterator[bytes]:
        """As `AnswerWriter.start`."""
        yield sse(self._chunk({"role": "assistant", "content": ""}))

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """As `AnswerWriter.piece`."""
        deltas: list[dict[str, Any]] = []
        for part in piece.parts:
            if part.call is not None:
                deltas.append({"tool_calls": [{"index": self._calls, **_call(part.call)}]})
                self._calls += 1
            if part.reasoning:
                deltas.append({"reasoning_content": part.reasoning})
            if part.content:
                deltas.append({"content": part.content})
        if not deltas and piece.logprobs and self._with_logprobs:
            deltas.append({})
        for number, delta in enumerate(deltas):
            yield sse(self._chunk(delta, logprobs=() if number else piece.logprobs))

    def end(self, answered: Answered) -> Iterator[bytes]:
        """As `AnswerWriter.end`."""
        yield from self._last(self._chunk({}, finish_reason=_finish_reason(answered)), answered)

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": self._logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = [
            {
                **self._token(token.token_id, token.logprob),
                "top_logprobs": [self._token(*likely) for likely in token.top],
            }
            for token in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        own = token_bytes(self._tokenizer, token_id)
        return {"token": own.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(own)}


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes of a token itself, which may be a part of a character."""
    text = str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
    piece = str(tokenizer.convert_ids_to_tokens(token_id))
    if "\ufffd" not in text:
        cut = piece.startswith("\u2581") and not text.startswith(" ")
        return f" {text}".encode() if cut else text.encode()
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    values = {character: value for value, character in bytes_to_unicode().items()}
    if all(character in values for character in piece):
        return bytes(values[character] for character in piece)
    return text.encode()


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"id": call.id, "type": "function", "function": function}


def _finish_reason(answered: Answered) -> str:
    reason = answered.reply.finish_reason
    return "tool_calls" if reason == "stop" and answered.answer.calls else reason


def _usage(reply: Reply) -> dict[str, Any]:
    prompt, completion = reply.report.tokens, len(reply.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": reply.report.cache_read},
    }
