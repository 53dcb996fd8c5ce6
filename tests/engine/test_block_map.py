"""Block maps that an engine keeps: against eager attention, over chunks, recoveries and answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patchkv_agents.backends.transformers import capture
from patchkv_agents.backends.transformers.adapter import MAX_ROWS, ModelAdapter
from patchkv_agents.recovery import Edited, Exact, RecoveryPolicy, Window

from .models import edited, random_ids, sequence_of, tiny_model

MAPPED = RecoveryPolicy("exact", Exact(records_map=True))
PATCH = RecoveryPolicy("patch", Window(40, tail_tokens=32, block_size=32, rule=Edited(0.05)))


@pytest.fixture
def every_row(monkeypatch):
    monkeypatch.setattr(capture, "MAP_ROW_STRIDE", 1)


def eager_map(model, ids, stride=1):
    """Pooled from the eager attention's own weights, all layers of the tiny models."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = model(torch.tensor(ids)[None], output_attentions=True).attentions
    model.set_attn_implementation("patchkv")
    rows = sum(layer[0].sum(dim=0) for layer in weights).numpy()
    blocks = -(-len(ids) // 32)
    pooled = np.zeros((blocks, blocks))
    for row in range(stride - 1, len(ids), stride):
        pooled[row // 32] += np.add.reduceat(rows[row], np.arange(0, len(ids), 32))
    sums = pooled.sum(axis=1, keepdims=True)
    return pooled / np.where(sums > 0, sums, 1)


@pytest.mark.parametrize(("name", "stride"), [("llama", 1), ("qwen3", 8)])
def test_a_prefill_leaves_the_map_of_eager_attention(name, stride, monkeypatch):
    """More tokens than run in one call, and a last block that is cut short."""
    monkeypatch.setattr(capture, "MAP_ROW_STRIDE", stride)
    model, ids = tiny_model(name), random_ids(1, MAX_ROWS + 109)
    sequence = sequence_of(model)
    sequence.resume(ids, MAPPED)
    sequence.suspend()
    mass = sequence.checkpoint.block_map.mass
    np.testing.assert_allclose(mass, eager_map(model, ids, stride), atol=1e-5)
    assert np.array_equal(mass, np.tril(mass))


def test_a_map_goes_on_while_an_answer_is_decoded(every_row):
    model, ids = tiny_model("llama"), random_ids(1, 150)
    sequence = sequence_of(model)
    sequence.resume(ids, MAPPED)
    for token in range(20):
        sequence.append(token + 3)
    sequence.suspend()
    mass = sequence.checkpoint.block_map.mass
    np.testing.assert_allclose(mass, eager_map(model, sequence.token_ids), atol=1e-5)


@pytest.mark.parametrize("suspended", [True, False], ids=["suspended", "live"])
def test_a_recovery_refreshes_rows_that_ran_and_carries_the_others_over(every_row, suspended):
    """Whole blocks are inserted, so that each block is either carried over or run."""
    model, old = tiny_model("llama"), random_ids(1, 640)
    new = edited(old, [(64, 0, 64)])
    sequence = sequence_of(model)
    sequence.resume(old, MAPPED)
    if suspended:
        sequence.suspend()
    plan = sequence.resume(new, PATCH).plan
    sequence.suspend()
    mass = sequence.checkpoint.block_map.mass
    expected = sequence_of(model)
    expected.resume(old, MAPPED)
    expected.suspend()
    before = expected.checkpoint.block_map
    carried = before.moved(plan.aligned).mass
    ran = ~plan.kept[::32]
    assert 5 < ran.sum() < 12
    np.testing.assert_allclose(mass[~ran], carried[~ran], atol=1e-6)
    first_stale = int(np.argmax(~ran[4:])) + 4
    fresh = eager_map(model, new)
    np.testing.assert_allclose(mass[2:first_stale], fresh[2:first_stale], atol=1e-5)
    assert (np.abs(mass[ran] - carried[ran]).sum(axis=1) > 0.01).all()


def test_an_exact_call_between_does_not_lose_the_map(every_row):
    model, ids = tiny_model("llama"), random_ids(1, 200)
    sequence = sequence_of(model)
    sequence.resume(ids, MAPPED)
    longer = np.append(ids, random_ids(2, 60))
    sequence.resume(longer, RecoveryPolicy.exact())
    sequence.suspend()
    # Which measures nothing itself: the blocks that it brought are unknown.
    mass = sequence.checkpoint.block_map.mass
    known = len(ids) // 32
    np.testing.assert_allclose(mass[:known], eager_map(model, longer)[:known], atol=1e-5)
    assert len(mass) == -(-len(longer) // 32) and not mass[known + 1 :].any()


def test_without_a_policy_that_needs_it_no_map_is_made():
    sequence = sequence_of(tiny_model("llama"))
    sequence.resume(random_ids(1, 100), RecoveryPolicy.exact())
    sequence.suspend()
    assert sequence.checkpoint.block_map is None


def test_rewound_rows_leave_the_map(every_row):
    model, ids = tiny_model("llama"), random_ids(1, 96)
    sequence = sequence_of(model)
    sequence.resume(ids, MAPPED)
    sequence.append(7)
    sequence.rewind(96)
    sequence.append(9)  # not collected any more
    sequence.suspend()
    mass = sequence.checkpoint.block_map.mass
    np.testing.assert_allclose(mass[:3, :3], eager_map(model, ids), atol=1e-5)
    assert mass.shape == (4, 4) and not mass[3].any()


def test_a_model_whose_attention_cannot_be_scored_has_no_map(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(
        "patchkv_agents.backends.transformers.adapter._scored_layers", lambda config: ()
    )
    sequence = sequence_of(model)
    assert isinstance(sequence._adapter, ModelAdapter)
    sequence.resume(random_ids(1, 100), MAPPED)
    sequence.suspend()
    assert sequence.checkpoint.block_map is None
