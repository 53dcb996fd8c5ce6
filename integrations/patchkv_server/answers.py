"""Answers on their way out, whichever API they go by."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from patchkv_agents.context.answers import Answer, AnswerPiece
from patchkv_agents.records import edit_record, report_record
from patchkv_server.errors import ApiError

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


class AnswerWriter(Protocol):
    """Writes one answer in the form of an API: whole, or as server-sent events."""

    @property
    def keep_alive(self) -> bytes:
        """What shows that a stream is alive while there is nothing to send."""
        ...

    def whole(self, answered: Answered) -> dict[str, Any]:
        """The answer in one piece."""
        ...

    def start(self) -> Iterable[bytes]:
        """Events before the pieces."""
        ...

    def piece(self, piece: Piece) -> Iterable[bytes]:
        """Events of a piece."""
        ...

    def end(self, answered: Answered) -> Iterable[bytes]:
        """Events behind the pieces."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The event of an error, which is the last one."""
        ...


def sse(value: Mapping[str, Any], event: str | None = None) -> bytes:
    """A server-sent event."""
    name = b"" if event is None else f"event: {event}\n".encode()
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    return name + b"data: " + data + b"\n\n"


def recovery_record(answered: Answered) -> dict[str, Any]:
    """What became of the conversation's state, with the edits that were found."""
    return {
        **report_record(answered.reply.report),
        "thread": answered.thread,
        "version": answered.reply.version_id,
        "edits": [edit_record(edit) for edit in answered.reply.edits],
    }
