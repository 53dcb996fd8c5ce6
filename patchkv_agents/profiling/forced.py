"""A full prefill's greedy answer, forced upon other keys and values of the same prompt.

One call gives the divergence at each token of the answer. Its mean scatters less than the first
token's alone, and the greedy answers are the same exactly if every token of the answer is the most
likely one at its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

import numpy as np
import numpy.typing as npt
import torch

from patchkv_agents.backends.transformers.adapter import RowCache
from patchkv_agents.backends.transformers.capture import (
    PROMPT_QUERIES,
    AttentionCapture,
    MapCapture,
    sampled_layers,
)
from patchkv_agents.divergence import token_kls
from patchkv_agents.engine import Engine
from patchkv_agents.profiling.comparison import CONTINUATION_TOKENS
from patchkv_agents.ranges import IntArray, RowSet


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a state of the prompt is from the exact one.

    Attributes:
        kl: KL(exact || state) in nats, mean over the tokens of the exact answer.
        first_kl: of the first of them.
        same_answer: whether the state's greedy answer has the same tokens.
    """

    kl: float
    first_kl: float
    same_answer: bool


@dataclass(frozen=True, slots=True, eq=False)
class ExactPrompt:
    """A prompt that was prefilled exactly, and its greedy answer.

    Attributes:
        token_ids: of the prompt and the answer, int64 `[prompt + answer]`.
        prompt: tokens of the prompt.
        cache: rows of all `token_ids` but the last.
        scores: attention that each token of the prompt received, float32 `[prompt]`.
        logits: that give the tokens of the answer, `[answer, vocab]`.
    """

    token_ids: IntArray
    prompt: int
    cache: RowCache
    scores: npt.NDArray[np.float32]
    logits: torch.Tensor

    @property
    def answer(self) -> IntArray:
        """Tokens of the answer, as many as were asked for, or up to the one that ends it."""
        return self.token_ids[self.prompt :]

    def divergence(self, engine: Engine, cache: RowCache, rows: RowSet) -> Divergence:
        """Of what `cache` holds once `rows` have run.

        Args:
            engine: of the same model.
            cache: has the other rows of the prompt, and room for those of the answer; changed.
            rows: of the prompt; its last token always runs.

        Raises:
            PatchKVError: logits are not numbers.
        """
        last = self.prompt - 1
        before = [(start, min(stop, last)) for start, stop in rows.ranges if start < last]
        every = RowSet((*before, (last, len(self.token_ids) - 1)))
        logits = engine.adapter.last_logits(self.token_ids, every, cache, count=len(self.answer))
        kls = token_kls(self.logits, logits)
        likeliest = logits.argmax(dim=-1).cpu().numpy()
        return Divergence(mean(kls), kls[0], bool((likeliest == self.answer).all()))


def captured_prefill(
    engine: Engine, token_ids: IntArray, *, room: int = 0, block_map: MapCapture | None = None
) -> tuple[RowCache, AttentionCapture, torch.Tensor]:
    """A full prefill: its rows, with room for more, the attention it captured, the last logits.

    Args:
        engine: runs it.
        token_ids: int64 `[tokens]`.
        room: rows more than tokens.
        block_map: collects a block map, if given.

    Raises:
        InputError: the prompt does not fit the model.
    """
    engine.check_length(len(token_ids))
    adapter, tokens = engine.adapter, len(token_ids)
    cache = adapter.new_cache(tokens + room)
    layers = sampled_layers(adapter.scored_layers)
    capture = AttentionCapture(layers=layers, prior=None, block_map=block_map)
    capture.announce(max(0, tokens - PROMPT_QUERIES), tokens)
    everything = RowSet.of_range(0, tokens)
    return cache, capture, adapter.forward_rows(token_ids, everything, cache, capture=capture)


def exact_prompt(
    engine: Engine, token_ids: IntArray, *, answer_tokens: int = CONTINUATION_TOKENS
) -> ExactPrompt:
    """Prefill a prompt and answer it greedily.

    Args:
        engine: runs it.
        token_ids: of the prompt, int64 `[tokens]`.
        answer_tokens: most tokens of the answer, at least 1.

    Raises:
        InputError: the prompt does not fit the model.
        PatchKVError: logits are not numbers.
    """
    adapter, prompt = engine.adapter, len(token_ids)
    cache, capture, logits = captured_prefill(engine, token_ids, room=answer_tokens - 1)
    scores = capture.scores(prompt)
    for _ in range(answer_tokens):
        token = int(logits.argmax())
        token_ids = np.append(token_ids, token)
        if token in engine.end_tokens or len(token_ids) == prompt + answer_tokens:
            break
        logits = adapter.forward_rows(
            token_ids, RowSet.of_range(len(token_ids) - 1, len(token_ids)), cache
        )
    # In one call, as `divergence` computes them: equal states then give equal bits.
    rows = RowSet.of_range(prompt - 1, len(token_ids) - 1)
    forced = adapter.last_logits(token_ids, rows, cache, count=len(token_ids) - prompt)
    token_kls(forced, forced)  # refuses what is not a number
    return ExactPrompt(token_ids, prompt, cache, scores, forced)
