"""A LangChain chat model from one generator: LangChain's methods in all their forms."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig, ensure_config
from typing_extensions import override

from patchkv_agents.context.answers import AnswerPiece
from patchkv_langchain.chat_answers import ChunkBuilder, FinalAnswer
from patchkv_langchain.chat_async import iterate_in_thread

if TYPE_CHECKING:
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun

_config: ContextVar[RunnableConfig | None] = ContextVar("patchkv_chat_config", default=None)
"""Of the call under way. LangChain does not pass all of it on to `_generate` and `_stream`."""


class AnsweringChatModel(BaseChatModel):
    """A chat model that answers by `_answer`, whichever method is called."""

    @abstractmethod
    def _answer(
        self,
        messages: Sequence[BaseMessage],
        stop: Sequence[str] | None,
        given: dict[str, Any],
        config: RunnableConfig,
    ) -> Generator[AnswerPiece | FinalAnswer, None, None]:
        """Answer: pieces, then the whole. All that a call does but LangChain's forms.

        Args:
            messages: of the call.
            stop: strings that end the answer; None for the model's own.
            given: further arguments of the call.
            config: of the call, with all of LangChain's configuration.
        """

    # LangChain's entry points, which note the configuration of the call.

    @override
    def invoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        with _calling(config):
            return super().invoke(input, config, **kwargs)

    @override
    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        with _calling(config):
            return await super().ainvoke(input, config, **kwargs)

    @override
    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        with closing(super().stream(input, config, **kwargs)) as chunks:  # type: ignore[type-var]
            while True:
                with _calling(config):  # not while the caller has a chunk
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                yield chunk

    @override
    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        chunks = super().astream(input, config, **kwargs)
        try:
            while True:
                with _calling(config):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                yield chunk
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]

    @override
    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with closing(
            self._answer(messages, stop, kwargs, _config.get() or ensure_config())
        ) as pieces:
            answers = [piece for piece in pieces if isinstance(piece, FinalAnswer)]
        return answers[-1].notified().result()

    @override
    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        pieces = iterate_in_thread(
            self._answer(messages, stop, kwargs, _config.get() or ensure_config())
        )
        answers = [piece async for piece in pieces if isinstance(piece, FinalAnswer)]
        return (await answers[-1].anotified()).result()

    @override
    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        make = ChunkBuilder()
        with closing(
            self._answer(messages, stop, kwargs, _config.get() or ensure_config())
        ) as pieces:
            for piece in pieces:
                yield make(piece.notified() if isinstance(piece, FinalAnswer) else piece)

    @override
    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        make = ChunkBuilder()
        pieces = iterate_in_thread(
            self._answer(messages, stop, kwargs, _config.get() or ensure_config())
        )
        try:
            async for piece in pieces:
                yield make(await piece.anotified() if isinstance(piece, FinalAnswer) else piece)
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]


@contextmanager
def _calling(config: RunnableConfig | None) -> Iterator[None]:
    token = _config.set(ensure_config(config))
    try:
        yield
    finally:
        _config.reset(token)
