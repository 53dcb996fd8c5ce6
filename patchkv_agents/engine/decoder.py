"""One answer while it is decoded: tokens into text, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from transformers import PreTrainedTokenizerBase

from patchkv_agents.engine.generation import SamplingParams, TextStream
from patchkv_agents.engine.reply import StreamChunk
from patchkv_agents.engine.sampler import Sampler, TokenLogprob


class AnswerDecoder:
    """Decodes until the model ends its turn, a stop string appears, or the limit is reached.

    Args:
        tokenizer: of the model.
        end_tokens: ids that end a turn.
        params: what the caller asked for.
        sampler: has drawn the first token.
        limit: most tokens, at least 1.

    Attributes:
        token_ids: tokens so far, the end-of-turn token not among them.
        finish_reason: `"length"` if the limit ended it, else `"stop"`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: Collection[int],
        params: SamplingParams,
        sampler: Sampler,
        limit: int,
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason = "stop"
        self._end_tokens = end_tokens
        self._sampler = sampler
        self._limit = limit
        self._text = TextStream(tokenizer, params.stop, params.keep_special)
        self._passed_on = 0  # tokens whose log-probabilities have gone out

    @property
    def text(self) -> str:
        """All text so far, without a stop string and what follows it."""
        return self._text.text

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of `token_ids`, if they were asked for."""
        return tuple(self._sampler.logprobs[: len(self.token_ids)])

    def pieces(self, token: int, append: Callable[[int], torch.Tensor]) -> Iterator[StreamChunk]:
        """The text as it appears, up to what `finish` returns.

        Args:
            token: the first.
            append: computes the state of a token, and returns the logits of the next, `[vocab]`.
        """
        while token not in self._end_tokens:
            self.token_ids.append(token)
            piece = self._text.add(token)
            if piece:
                yield StreamChunk(piece, logprobs=self._new_logprobs())
            if self._text.stopped:
                return
            if len(self.token_ids) == self._limit:
                self.finish_reason = "length"
                return
            token = self._sampler(append(token))

    def finish(self) -> StreamChunk:
        """The rest of the text, once there are no more tokens."""
        return StreamChunk(self._text.finish(), logprobs=self._new_logprobs())

    def _new_logprobs(self) -> tuple[TokenLogprob, ...]:
        new = self.logprobs[self._passed_on :]
        self._passed_on = len(self.token_ids)
        return new
