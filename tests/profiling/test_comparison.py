"""The measures that methods are compared by."""

from __future__ import annotations

import math

import pytest
import torch

from patchkv_agents.divergence import first_token_kl
from patchkv_agents.errors import PatchKVError

NONE = float("-inf")


def test_kl_of_a_hand_computed_pair():
    """KL((1/2, 1/2) || (1/4, 3/4)) = 1/2 ln 2 + 1/2 ln(2/3)."""
    reference = torch.tensor([0.0, 0.0])
    logits = torch.tensor([1.0, 3.0]).log()
    assert first_token_kl(reference, logits) == pytest.approx(0.5 * math.log(2 * 2 / 3))
    assert first_token_kl(reference, reference + 7) == 0


def test_kl_equals_torch():
    generator = torch.Generator().manual_seed(0)
    reference, logits = torch.randn(2, 1000, generator=generator, dtype=torch.float64) * 3
    expected = torch.nn.functional.kl_div(
        logits.log_softmax(-1), reference.log_softmax(-1), log_target=True, reduction="sum"
    )
    assert first_token_kl(reference, logits) == pytest.approx(float(expected), rel=1e-9)


def test_tokens_that_are_excluded():
    """0 ln 0 is 0; a token that only the reference allows makes it infinite."""
    reference = torch.tensor([1.0, NONE, 3.0])
    assert first_token_kl(reference, torch.tensor([5.0, NONE, -3.0])) > 1
    assert first_token_kl(reference, torch.tensor([1.0, 2.0, NONE])) == math.inf


def test_nan_is_no_perfect_score():
    """`max(0.0, nan)` is 0.0: a method with NaN logits had the best possible KL."""
    good = torch.tensor([0.0, 1.0])
    for reference, logits in ((good, good * float("nan")), (good * float("nan"), good)):
        with pytest.raises(PatchKVError, match="not numbers"):
            first_token_kl(reference, logits)
