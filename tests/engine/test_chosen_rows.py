"""Rows chosen while a plan runs: blocks by the question's attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from patchkv_agents.recovery import Blocks, Question, RecoveryPolicy, RowLabel, Window

from .models import edited, full_logits, full_rows, random_ids, sequence_of, tiny_model

EDITS = {
    "replacement": [(120, 30, 41)],
    "deletion": [(120, 37, 0)],
    "five": [(60, 5, 9), (130, 20, 0), (210, 0, 33), (300, 17, 17), (390, 3, 1)],
}
BASE = RecoveryPolicy("base", Window(16, tail_tokens=32, block_size=32, rule=Blocks(0.1)))
QUESTION = BASE.varied(rule=Question(0.1))


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def close(actual, expected, tolerance=1e-4):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def resumed(model, policy, edits, suspended=True, tokens=500):
    old = random_ids(1, tokens)
    sequence = sequence_of(model)
    sequence.resume(old, RecoveryPolicy.exact())
    if suspended:
        sequence.suspend()
    return sequence, sequence.resume(edited(old, edits), policy)


def kept_rows(sequence):
    shard = sequence.live_cache.shards[0]
    tokens = len(sequence.token_ids)
    return shard.keys[:, :, :tokens].clone(), shard.values[:, :, :tokens].clone()


@pytest.mark.parametrize("suspended", [True, False], ids=["suspended", "live"])
@pytest.mark.parametrize("edits", [EDITS["deletion"], EDITS["five"]], ids=["deletion", "five"])
def test_choosing_every_row_is_a_full_prefill(model, suspended, edits):
    whole = QUESTION.varied(rule=Question(1.0))
    sequence, found = resumed(model, whole, edits, suspended)
    new = sequence.token_ids
    assert found.plan.is_exact
    close(found.logits, full_logits(model, new))
    for actual, expected in zip(kept_rows(sequence), full_rows(model, new), strict=True):
        close(actual, expected)


@pytest.mark.parametrize("edits", [EDITS["replacement"], EDITS["five"]], ids=["one", "five"])
def test_what_was_chosen_late_is_what_a_plan_of_it_gives(model, edits, monkeypatch):
    """The same rows, run at once in ascending order from the same stored state."""
    sequence, found = resumed(model, QUESTION, edits)
    labels = found.plan.labels
    other, _ = resumed(model, BASE, [], suspended=False)
    other.suspend()
    monkeypatch.setattr(Window, "plan", lambda *args, **kwargs: replace(found.plan, run_twice=0))
    at_once = other.resume(sequence.token_ids, BASE)
    assert np.array_equal(at_once.plan.labels, labels)
    assert 0 < found.plan.count(RowLabel.RESTORED)
    close(found.logits, at_once.logits)
    for actual, expected in zip(kept_rows(sequence), kept_rows(other), strict=True):
        close(actual, expected)
    sequence.suspend(), other.suspend()
    assert np.array_equal(sequence.checkpoint.origins, other.checkpoint.origins)


def test_no_row_sees_a_later_key(model):
    """A NaN planted in a row of old state marks every row that reads it."""
    old = random_ids(1, 500)
    new = edited(old, EDITS["five"])
    plan = resumed(model, QUESTION, EDITS["five"], suspended=False)[1].plan
    restored = np.flatnonzero(plan.labels == RowLabel.RESTORED)
    marker = int(restored[len(restored) // 2])
    sequence = sequence_of(model)
    sequence.resume(old, RecoveryPolicy.exact())
    shard = sequence.live_cache.shards[0]
    shard.keys[:, :, plan.aligned[marker]] = shard.values[:, :, plan.aligned[marker]] = torch.nan
    found = sequence.resume(new, QUESTION)
    marked = torch.stack(kept_rows(sequence)).isnan().any(dim=(0, 1, 2, 4)).numpy()
    assert not marked[:marker].any()
    if found.plan.kept[marker]:
        assert marked[marker:][~found.plan.kept[marker:]].all() and found.logits.isnan().any()


def test_the_question_finds_the_blocks_that_it_attends_to(model):
    """By eager attention of the end of the new context, all else equal but for stale rows."""
    sequence, found = resumed(model, QUESTION, EDITS["replacement"])
    chosen = np.flatnonzero(found.plan.labels == RowLabel.ATTENTION)
    assert len(chosen)
    new = sequence.token_ids
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = model(torch.tensor(new)[None], output_attentions=True).attentions
    model.set_attn_implementation("patchkv")
    mass = sum(layer[0, :, -32:].sum(dim=(0, 1)) for layer in weights).numpy()
    candidates = (found.plan.labels == RowLabel.RESTORED) | (
        found.plan.labels == RowLabel.ATTENTION
    )
    best = np.argmax(np.where(candidates & found.plan.suffix, mass, 0))
    assert best // 32 in set(chosen // 32)
    plan = found.plan
    tail = plan.count(RowLabel.TAIL)
    assert plan.run_twice == tail > 0
    rows = len(plan.rows) + tail
    assert plan.recompute_ratio == pytest.approx(rows / (len(new) - plan.prefix))
