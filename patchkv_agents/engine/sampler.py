"""Drawing one token after another from the model's logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from patchkv_agents.engine.generation import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was to the model, before penalties, temperature and filters.

    Attributes:
        token_id: the token.
        logprob: its log-probability, in nats.
        top: the likeliest tokens in its place and their log-probabilities, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Draws tokens as Transformers' `generate` does, with its processors in its order.

    Args:
        params: how.
        prompt: token ids, which a repetition penalty counts.
        generation_config: of the model; gives the repetition penalty where `params` has none.
        device: of the logits.

    Attributes:
        logprobs: of the tokens drawn so far, if `params` asks for them.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        generation_config: GenerationConfig | None,
        device: torch.device,
    ) -> None:
        self.logprobs: list[TokenLogprob] = []
        self._params = params
        self._begin = list(reversed(params.begin))
        self._drawn: Counter[int] = Counter()
        penalty = params.repetition_penalty
        if penalty is None:
            penalty = getattr(generation_config, "repetition_penalty", None) or 1.0
        self._ids: Any = None  # of all tokens so far
        self._processors = LogitsProcessorList()
        if penalty != 1:
            self._ids = torch.tensor([list(prompt)], dtype=torch.long, device=device)
            self._processors.append(RepetitionPenaltyLogitsProcessor(float(penalty)))
        self._warpers = LogitsProcessorList()
        if params.temperature > 0:
            self._warpers.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.top_k:
            self._warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            self._warpers.append(TopPLogitsWarper(float(params.top_p)))
        if params.min_p > 0:
            self._warpers.append(MinPLogitsWarper(float(params.min_p)))
        self._generator = torch.Generator(device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """The next token id from logits `[vocab]`."""
        token = self._begin.pop() if self._begin else self._draw(logits)
        if self._params.logprobs is not None:
            self.logprobs.append(_logprob(logits, token, self._params.logprobs))
        self._drawn[token] += 1
        if self._ids is not None:
            drawn = torch.tensor([[token]], device=self._ids.device)
            self._ids = torch.cat([self._ids, drawn], dim=1)
        return token

    def _draw(self, logits: torch.Tensor) -> int:
        scores = self._penalised(logits)
        if self._params.temperature == 0:
            return int(scores.argmax())
        ids: Any = torch.empty(1, 0, dtype=torch.long)  # warpers look at none
        probabilities = self._warpers(ids, scores[None]).softmax(dim=-1)
        return int(torch.multinomial(probabilities[0], 1, generator=self._generator))

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits after penalties, float32 `[vocab]`; a copy.

        A frequency penalty is taken off once for each time that the answer has the token, a
        presence penalty once (the formula of OpenAI's API reference, "frequency and presence
        penalties").
        """
        scores = logits.float().clone()
        if self._ids is not None:
            scores = self._processors(self._ids, scores[None])[0]
        per_token, once = self._params.frequency_penalty, self._params.presence_penalty
        if self._drawn and (per_token or once):
            ids = torch.tensor(list(self._drawn), device=scores.device)
            counts = torch.tensor(list(self._drawn.values()), device=scores.device)
            scores[ids] -= per_token * counts.to(scores.dtype) + once
        return scores


def _logprob(logits: torch.Tensor, token: int, count: int) -> TokenLogprob:
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(count)
    likeliest = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprob(token, float(logprobs[token]), tuple(likeliest))
