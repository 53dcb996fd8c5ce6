"""What a model's answer says: text, reasoning and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass

from patchkv_agents.context.messages import Message, ToolCall


@dataclass(frozen=True, slots=True)
class InvalidCall:
    """What begins like a call and cannot be read.

    Attributes:
        text: as the model wrote it, its markers included. It is part of the answer's content too.
        error: why it cannot be read.
    """

    text: str
    error: str


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Something more of an answer; one of the fields is set.

    Attributes:
        content: text.
        reasoning: text of the reasoning.
        call: a whole call.
        invalid: one that cannot be read. Its text comes as content beside it.
    """

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None
    invalid: InvalidCall | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, taken apart.

    Attributes:
        content: what is neither reasoning nor a call. White space between these is left out.
        calls: with ids, in order.
        invalid: what begins like a call and cannot be read; its text is in `content`.
        reasoning: without the white space around it; None if there is none.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    invalid: tuple[InvalidCall, ...] = ()
    reasoning: str | None = None

    def to_message(self) -> Message:
        """The assistant message of this answer."""
        return Message(
            "assistant",
            content=self.content if self.content or not self.calls else None,
            tool_calls=self.calls,
            reasoning=self.reasoning,
        )
