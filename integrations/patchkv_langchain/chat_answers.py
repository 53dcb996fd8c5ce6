"""Answers of the engine as LangChain's messages and chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from patchkv_agents.context.answers import Answer, AnswerPiece
from patchkv_agents.records import edit_record, report_record
from patchkv_langchain.events import adispatch_reply, dispatch_reply

if TYPE_CHECKING:
    from patchkv_agents.engine.reply import Reply
    from patchkv_agents.recovery.report import RecoveryReport


@dataclass(frozen=True, slots=True, eq=False)
class FinalAnswer:
    """A finished answer.

    Attributes:
        answer: taken apart.
        reply: of the engine.
        model_name: of the model.
    """

    answer: Answer
    reply: Reply
    model_name: str

    def notified(self) -> FinalAnswer:
        """Itself, after LangChain's handlers were notified of the edits and the recovery."""
        dispatch_reply(self.reply.report, self.reply.edits, self.reply.version_id)
        return self

    async def anotified(self) -> FinalAnswer:
        """As `notified`, in asynchronous code."""
        await adispatch_reply(self.reply.report, self.reply.edits, self.reply.version_id)
        return self

    def result(self) -> ChatResult:
        """The message as `_generate` returns it."""
        return ChatResult(generations=[ChatGeneration(message=self.message())])

    def message(self) -> AIMessage:
        """The whole message."""
        answer = self.answer
        return AIMessage(
            content=answer.content,
            additional_kwargs=_reasoning(answer.reasoning or ""),
            tool_calls=[
                tool_call(name=call.name, args=call.parsed_arguments(), id=call.id)
                for call in answer.calls
            ],
            invalid_tool_calls=[
                invalid_tool_call(args=invalid.text, error=invalid.error)
                for invalid in answer.invalid
            ],
            usage_metadata=self.usage(),
            response_metadata=self.metadata(),
        )

    def last_chunk(self) -> AIMessageChunk:
        """What comes behind the pieces of a streamed answer."""
        return AIMessageChunk(
            content="",
            usage_metadata=self.usage(),
            response_metadata=self.metadata(),
            chunk_position="last",
        )

    def usage(self) -> UsageMetadata:
        """Tokens by what became of them; the details of the prompt are disjoint."""
        report, answered = self.reply.report, len(self.reply.token_ids)
        return UsageMetadata(
            input_tokens=report.tokens,
            output_tokens=answered,
            total_tokens=report.tokens + answered,
            input_token_details=_details(report),
        )

    def metadata(self) -> dict[str, Any]:
        """What LangChain puts into `response_metadata`."""
        stopped = self.reply.finish_reason == "stop"
        return {
            "model_name": self.model_name,
            "finish_reason": "tool_calls"
            if stopped and self.answer.calls
            else self.reply.finish_reason,
            "context_version": self.reply.version_id,
            "edits": [edit_record(edit) for edit in self.reply.edits],
            "recovery": report_record(self.reply.report),
        }


def _details(report: RecoveryReport) -> InputTokenDetails:
    return {  # type: ignore[typeddict-unknown-key]  # others than LangChain's own are allowed
        "cache_read": report.cache_read,
        "recovered": report.restored,
        "recomputed": report.tokens - report.prefix - report.new - report.restored,
    }


def _reasoning(text: str) -> dict[str, Any]:
    return {"reasoning_content": text} if text else {}


class ChunkBuilder:
    """Makes chunks of the pieces of one answer."""

    def __init__(self) -> None:
        self._calls = 0  # so far, valid or not

    def __call__(self, piece: AnswerPiece | FinalAnswer) -> ChatGenerationChunk:
        """The chunk of a piece, or what comes behind the pieces."""
        if isinstance(piece, FinalAnswer):
            return ChatGenerationChunk(message=piece.last_chunk())
        chunks = []
        if piece.call is not None:
            call = piece.call
            chunks = [
                tool_call_chunk(
                    name=call.name, args=call.arguments_json, id=call.id, index=self._calls
                )
            ]
        elif piece.invalid is not None:  # no JSON: LangChain counts it among the invalid calls
            chunks = [tool_call_chunk(args=piece.invalid.text, index=self._calls)]
        self._calls += len(chunks)
        message = AIMessageChunk(
            content=piece.content,
            additional_kwargs=_reasoning(piece.reasoning),
            tool_call_chunks=chunks,
        )
        return ChatGenerationChunk(message=message)
