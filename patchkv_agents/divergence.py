"""How far one prediction of the next token is from another."""

from __future__ import annotations

import torch

from patchkv_agents.errors import PatchKVError


def first_token_kl(reference: torch.Tensor, logits: torch.Tensor) -> float:
    """KL(reference || logits) of two logit vectors `[vocab]`; see `token_kls`."""
    return token_kls(reference[None], logits[None])[0]


def token_kls(reference: torch.Tensor, logits: torch.Tensor) -> list[float]:
    """KL(reference || logits) of each pair of logit vectors, `[tokens, vocab]`; at least 0.

    In nats, in float64. Infinite where `logits` excludes a token that `reference` allows.

    Raises:
        PatchKVError: a vector has NaN or no finite entry.
    """
    expected = reference.double().log_softmax(dim=-1)
    actual = logits.double().log_softmax(dim=-1)
    if expected.isnan().any() or actual.isnan().any():
        raise PatchKVError(
            "the model's logits are not numbers: check its weights and dtype (float16 overflows in "
            "some models; try bfloat16 or float32)"
        )
    probability = expected.exp()
    terms = torch.where(probability > 0, probability * (expected - actual), 0.0)
    return [max(0.0, kl) for kl in terms.sum(dim=-1).tolist()]
