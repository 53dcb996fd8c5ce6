"""A chat model whose answers are given, for testing agents with real recovery."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage
from pydantic import Field, PrivateAttr

from patchkv_agents.context import Message, from_langchain
from patchkv_agents.context.rendering.template import ChatTemplate
from patchkv_agents.errors import InputError
from patchkv_langchain.chat import ChatPatchKV

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from patchkv_agents.engine import Thread
    from patchkv_agents.engine.reply import StreamChunk


class ScriptedChatPatchKV(ChatPatchKV):
    """`ChatPatchKV` whose answers are given.

    The engine works as it always does: it renders, recovers and prefills the context, and computes
    the KV rows of the answer. Only the choice of the answer's tokens is not the model's. So an
    agent can be tested with calls of tools that a small model would not make.

    Args:
        answers: one for each call, in order: a text as the model would write it, or a message,
            which the chat template writes.
    """

    answers: list[Any] = Field(default_factory=list)

    _said: int = PrivateAttr(default=0)
    _turn: Any = PrivateAttr(default_factory=threading.Lock)

    def _replies(
        self, thread: Thread, messages: Sequence[Message], **options: Any
    ) -> Generator[StreamChunk, None, None]:
        tokenizer = thread.tokenizer
        text = self._next_answer()
        if isinstance(text, AIMessage):
            text = _written(text, messages, tokenizer, options)
        ids = tokenizer.encode(text, add_special_tokens=False)
        begin = [*ids, tokenizer.eos_token_id]
        yield from super()._replies(thread, messages, **{**options, "begin": begin})

    def _next_answer(self) -> AIMessage | str:
        with self._turn:
            if self._said == len(self.answers):
                raise InputError(
                    f"the script has {self._said} answers, and the model was asked for one more"
                )
            self._said += 1
            answer: AIMessage | str = self.answers[self._said - 1]
            return answer


def _written(
    answer: AIMessage,
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    options: dict[str, Any],
) -> str:
    """The text of an answer, as the chat template writes it behind the context."""
    (said,) = from_langchain([answer], keep="shown")
    template = ChatTemplate(tokenizer)

    def rendered(context: Sequence[Message], *, prompt: bool) -> str:
        return template.apply(
            context,
            options.get("tools") or (),
            options.get("template_args") or {},
            add_generation_prompt=prompt,
            visit=lambda _message, _field, text: text,
        )

    begun = rendered(messages, prompt=True)
    whole = rendered([*messages, said], prompt=False)
    written = whole[len(begun) :].partition(str(tokenizer.eos_token))[0]
    shows_calls = all(call.name in written for call in said.tool_calls)
    if not whole.startswith(begun) or not shows_calls:
        raise InputError(
            "the chat template writes an answer in another way than it begins one, or without its "
            "calls: give the answer as a text"
        )
    return written
