"""One answer of a model while it is written: from text to content, reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from patchkv_agents.context import FrozenJson
from patchkv_agents.context.answers import Answer, AnswerPiece, AnswerStyle

if TYPE_CHECKING:
    from patchkv_agents.engine.reply import Reply, StreamChunk
    from patchkv_agents.engine.sampler import TokenLogprob


class RunOptions(TypedDict):
    """Arguments of `Thread.stream` that an answer needs to be taken apart."""

    begin: Sequence[int]
    keep_special: Sequence[str]


@dataclass(frozen=True, slots=True)
class RunPieces:
    """What a piece of the stream adds to an answer.

    Attributes:
        pieces: of the answer.
        logprobs: of its tokens, if they were asked for.
    """

    pieces: tuple[AnswerPiece, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class AnswerRun:
    """Takes the stream of one call of `Thread.stream` apart.

    Usage: pass `options` to `Thread.stream`, iterate over `pieces(...)` of it, then read `answer`
    and `reply`.

    Args:
        style: how the model writes answers.
        tools: that the model is shown.
        template_args: of the chat template.
        tool_choice: `auto`; `none`: nothing is a call; `any` or a tool's name: the answer is made
            to begin as a call of one.
        one_call: all calls but the first are left out.
        begin: text with which the answer has to begin, where `tool_choice` forces no call.
        salt: goes into the ids of calls (see `AnswerStyle.parser`).

    Raises:
        InputError: a call cannot be forced.
    """

    def __init__(
        self,
        style: AnswerStyle,
        tools: Sequence[FrozenJson] = (),
        *,
        template_args: Mapping[str, Any] | None = None,
        tool_choice: str = "auto",
        one_call: bool = False,
        begin: str = "",
        salt: str = "",
    ) -> None:
        if tool_choice not in ("auto", "none"):
            name = None if tool_choice == "any" else tool_choice
            begin = style.opening(tools, name, template_args=template_args)
        self._begin = begin
        self._style = style
        self._parser = style.parser(
            () if tool_choice == "none" else tools, template_args=template_args, salt=salt
        )
        self._one_call = one_call
        self._has_call = False
        self._reply: Reply | None = None

    @property
    def options(self) -> RunOptions:
        """Arguments for `Thread.stream`."""
        begin = self._begin
        encoded = self._style.tokenizer.encode(begin, add_special_tokens=False) if begin else ()
        return {"begin": encoded, "keep_special": self._style.markers}

    def pieces(self, chunks: Iterable[StreamChunk]) -> Generator[RunPieces, None, None]:
        """Yield what each piece of the stream adds, and close the stream at the end.

        Raises:
            RuntimeError: the stream ends without a reply.
        """
        with ExitStack() as stack:
            if isinstance(chunks, Generator):
                stack.enter_context(closing(chunks))
            for chunk in chunks:
                self._reply = chunk.reply
                yield RunPieces(self._wanted(self._parser.feed(chunk.text)), chunk.logprobs)
        if self._reply is None:
            raise RuntimeError("the stream ended without a reply")
        yield RunPieces(self._wanted(self._parser.finish()))

    @property
    def reply(self) -> Reply:
        """The engine's reply, once the stream has ended.

        Raises:
            RuntimeError: it has not.
        """
        if self._reply is None:
            raise RuntimeError("the answer is not finished")
        return self._reply

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream has ended."""
        answer = self._parser.answer
        return replace(answer, calls=answer.calls[:1]) if self._one_call else answer

    def _wanted(self, pieces: Iterable[AnswerPiece]) -> tuple[AnswerPiece, ...]:
        wanted = []
        for piece in pieces:
            if piece.call is not None:
                if self._one_call and self._has_call:
                    continue
                self._has_call = True
            wanted.append(piece)
        return tuple(wanted)
