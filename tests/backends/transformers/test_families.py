"""Every verified family: recovery is exact where it says so, and moved keys are the model's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patchkv_agents.backends.transformers.adapter import ModelAdapter
from patchkv_agents.backends.transformers.families import FAMILIES
from patchkv_agents.backends.transformers.probe import probe
from patchkv_agents.backends.transformers.support import support_of
from patchkv_agents.backends.transformers.verdict import SupportLevel
from patchkv_agents.engine.sequence import KVSequence
from patchkv_agents.recovery import Blocks, RecoveryPolicy, Window
from patchkv_kernels import PayloadFormat, dequantize_scatter, quantize_gather
from tests.engine.models import edited, plain_rows, random_ids

from .families import CONFIGS, TINY, model_of
from .types import APPROXIMATE

WHOLE_SUFFIX = RecoveryPolicy("whole", Window(10**6, tail_tokens=64, block_size=32))
PATCH = RecoveryPolicy("patch", Window(16, tail_tokens=8, rule=Blocks(0.1)))
DECODED = 32


def test_every_family_of_the_table_is_tested():
    """Types whose RoPE the table names here, the others in `test_types`."""
    known = {name for name, family in FAMILIES.items() if family.layout is not None}
    assert {config().model_type for config in TINY.values()} == known
    others = {name.partition("/")[0] for name in APPROXIMATE}
    assert set(FAMILIES) - known <= others


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_recovery_with_the_whole_suffix_repaired_is_a_full_prefill(name):
    """Also through 32 decoded tokens. The reference is the model with its own, eager attention
    (the oldest supported Transformers runs Gemma 2 with SDPA, which drops its capping of scores).
    """
    model, reference = model_of(CONFIGS[name]()), model_of(CONFIGS[name](), "eager")
    old = random_ids(1, 150)
    new = edited(old, [(40, 10, 17), (100, 5, 0)])
    sequence = KVSequence(ModelAdapter(model), support_of(model).rope)
    sequence.resume(old, RecoveryPolicy.exact())
    sequence.suspend()
    resumed = sequence.resume(new, WHOLE_SUFFIX, room=DECODED)
    assert resumed.plan.is_exact and resumed.restored_formats == {"native": 40}
    logits = [resumed.logits]
    while len(logits) <= DECODED:
        logits.append(sequence.append(int(logits[-1].argmax())))
    with torch.inference_mode():
        expected = reference(torch.tensor(sequence.token_ids)[None], use_cache=False).logits
    expected = expected[0, len(new) - 1 :]
    # Each sampled token is the reference's choice too: so is the whole answer.
    assert sequence.token_ids[len(new) :].tolist() == expected[:-1].argmax(dim=-1).tolist()
    torch.testing.assert_close(torch.stack(logits), expected, atol=1e-3, rtol=0)
    assert expected.std() > 0.03  # a wrong row would show


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_moved_keys_are_the_keys_of_the_new_positions(name):
    """Stored and restored elsewhere: what the model computes for the same tokens there."""
    model, shift = model_of(CONFIGS[name]()), 300
    rope = support_of(model).rope
    ids = random_ids(2, 97)
    keys, values = plain_rows(model, ids)
    expected, _ = plain_rows(model, ids, shift=shift)
    scale = keys.square().mean().sqrt()
    rows = np.arange(97)
    for format, tolerance in ((PayloadFormat.NATIVE, 1e-4), (PayloadFormat.K8V8, 0.05)):
        payload = quantize_gather(keys, values, [(0, 97, 0)], format=format, rope=rope)
        moved, restored = torch.full_like(keys, torch.nan), torch.full_like(values, torch.nan)
        dequantize_scatter(payload, rows, rows, rows + shift, moved, restored, rope=rope)
        torch.testing.assert_close(moved, expected, atol=float(tolerance * scale), rtol=0.02)
    if rope.inv_freq.any():
        assert (expected - keys).square().mean().sqrt() > 0.1 * scale


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_table_agrees_with_the_probe(name):
    """The probe knows nothing of families; it finds the rope from the model's keys."""
    model = model_of(CONFIGS[name](), "eager")
    support = support_of(model)
    verdict, found = probe(model)
    assert verdict == support.verdict and verdict.level is SupportLevel.APPROXIMATE
    assert found is not None and found.layout is support.rope.layout
    assert np.array_equal(found.inv_freq, support.rope.inv_freq)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama", 4), ("smollm3", 4), ("gemma3_text", 2), ("qwen2-window", 2), ("gemma2", 0)],
)
def test_attention_is_scored_in_layers_that_see_everything(name, layers):
    """A score from a windowed or capped layer would be wrong; without scores H is empty."""
    model = model_of(TINY[name]())
    adapter = ModelAdapter(model)
    assert len(adapter.scored_layers) == layers
    sequence = KVSequence(adapter, support_of(model).rope)
    old = random_ids(1, 150)
    sequence.resume(old, RecoveryPolicy.exact())
    sequence.suspend()
    scores = sequence.checkpoint.scores
    assert scores.sum() == pytest.approx(1.0 if layers else 0.0)
    assert (scores[:90] > 0).all() == bool(layers)  # further back than the windows reach
    assert not sequence.resume(edited(old, [(40, 10, 17)]), PATCH).plan.is_exact


def test_capped_scores_are_capped_outside_the_engine_too():
    """SDPA has no cap, and in one supported release drops it without a word."""
    model, reference = model_of(TINY["gemma2"]()), model_of(TINY["gemma2"](), "eager")
    ModelAdapter(model)
    ids = torch.tensor(random_ids(3, 60)).view(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0  # padded on the left
    with torch.inference_mode():
        actual, expected = (
            model(ids, attention_mask=mask, use_cache=False).logits for model in (model, reference)
        )
    torch.testing.assert_close(actual[1], expected[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(actual[0, 7:], expected[0, 7:], atol=1e-4, rtol=0)
