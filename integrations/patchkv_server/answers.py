"""From what the engine answered to OpenAI's chat completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkv_agents.context import ToolCall
from patchkv_agents.context.answers import Answer, AnswerPiece
from patchkv_agents.records import edit_record, report_record

if TYPE_CHECKING:
    from patchkv_agents.engine.reply import Reply
    from patchkv_agents.engine.sampler import TokenLogprob


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Something more of an answer.

    Attributes:
        parts: text, reasoning and calls.
        logprobs: of the tokens since the piece before.
    """

    parts: tuple[AnswerPiece, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """A whole answer.

    Attributes:
        answer: taken apart.
        reply: of the engine.
        thread: name of the conversation.
    """

    answer: Answer
    reply: Reply
    thread: str


class Completion:
    """Writes one answer as a chat completion, whole or in chunks.

    Args:
        model: as the client calls it.
        tokenizer: of the model.
        with_logprobs: they were asked for.
        one_call: all calls but the first are left out.
    """

    def __init__(self, model: str, tokenizer: Any, *, with_logprobs: bool, one_call: bool) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._one_call = one_call
        self._calls = 0
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, answered: Answered) -> dict[str, Any]:
        """The answer in one piece."""
        answer = answered.answer
        calls = answer.calls[:1] if self._one_call else answer.calls
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
            "recovery": _recovery(answered),
        }

    def first_chunk(self) -> dict[str, Any]:
        """What comes before the pieces."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of a piece."""
        deltas: list[dict[str, Any]] = []
        for part in piece.parts:
            if part.call is not None and not (self._one_call and self._calls):
                deltas.append({"tool_calls": [{"index": self._calls, **_call(part.call)}]})
                self._calls += 1
            if part.reasoning:
                deltas.append({"reasoning_content": part.reasoning})
            if part.content:
                deltas.append({"content": part.content})
        if not deltas and piece.logprobs and self._with_logprobs:
            deltas.append({})
        return [
            self._chunk(delta, logprobs=() if number else piece.logprobs)
            for number, delta in enumerate(deltas)
        ]

    def last_chunks(self, answered: Answered, *, include_usage: bool) -> list[dict[str, Any]]:
        """What comes behind the pieces; the last one has the report, and usage if wanted."""
        finish = self._chunk({}, finish_reason=_finish_reason(answered))
        recovery = {"recovery": _recovery(answered)}
        if not include_usage:
            return [finish | recovery]
        usage = {"choices": [], "usage": _usage(answered.reply)}
        return [finish, self._head("chat.completion.chunk") | usage | recovery]

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

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": None,
        }

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
        text = str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


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


def _recovery(answered: Answered) -> dict[str, Any]:
    return {
        **report_record(answered.reply.report),
        "thread": answered.thread,
        "version": answered.reply.version_id,
        "edits": [edit_record(edit) for edit in answered.reply.edits],
    }
