"""Rows chosen while a plan runs: windows by measured drift, blocks by the question's attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from patchkv_agents.backends.transformers.adapter import ModelAdapter
from patchkv_agents.backends.transformers.capture import sampled_layers
from patchkv_agents.ranges import ranges_of
from patchkv_agents.recovery import RecoveryPolicy, RowLabel
from patchkv_agents.recovery.policy import MeasuredStop, Selection

from .models import edited, full_logits, full_rows, random_ids, sequence_of, tiny_model

EDITS = {
    "replacement": [(120, 30, 41)],
    "deletion": [(120, 37, 0)],
    "five": [(60, 5, 9), (130, 20, 0), (210, 0, 33), (300, 17, 17), (390, 3, 1)],
}
BASE = RecoveryPolicy("base", window_tokens=16, attention_fraction=0.1, tail_tokens=32)
STOPPED = replace(BASE, stop=MeasuredStop(drift=0.05, step_tokens=16, most_tokens=48))
QUESTION = replace(BASE, selection=Selection.QUESTION)
OPTIONS = {
    "stop": STOPPED,
    "question": QUESTION,
    "both": replace(STOPPED, selection=Selection.QUESTION),
}


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


@pytest.mark.parametrize("policy", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("suspended", [True, False], ids=["suspended", "live"])
@pytest.mark.parametrize("edits", [EDITS["deletion"], EDITS["five"]], ids=["deletion", "five"])
def test_choosing_every_row_is_a_full_prefill(model, policy, suspended, edits):
    stop = policy.stop and MeasuredStop(drift=1e-9, step_tokens=32, most_tokens=10**6)
    question = policy.selection is Selection.QUESTION
    whole = replace(policy, stop=stop, attention_fraction=1.0 if question else 0.0)
    sequence, found = resumed(model, whole, edits, suspended)
    new = sequence.token_ids
    assert found.plan.is_exact
    close(found.logits, full_logits(model, new))
    for actual, expected in zip(kept_rows(sequence), full_rows(model, new), strict=True):
        close(actual, expected)


@pytest.mark.parametrize("policy", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("edits", [EDITS["replacement"], EDITS["five"]], ids=["one", "five"])
def test_what_was_chosen_late_is_what_a_plan_of_it_gives(model, policy, edits, monkeypatch):
    """The same rows, run at once in ascending order from the same stored state."""
    sequence, found = resumed(model, policy, edits)
    labels = found.plan.labels
    other, _ = resumed(model, BASE, [], suspended=False)
    other.suspend()
    monkeypatch.setattr(
        "patchkv_agents.recovery.donors.plan_recovery",
        lambda *args, **kwargs: replace(found.plan, run_twice=0),
    )
    at_once = other.resume(sequence.token_ids, BASE)
    assert np.array_equal(at_once.plan.labels, labels)
    assert 0 < found.plan.count(RowLabel.RESTORED)
    close(found.logits, at_once.logits)
    for actual, expected in zip(kept_rows(sequence), kept_rows(other), strict=True):
        close(actual, expected)
    sequence.suspend(), other.suspend()
    assert np.array_equal(sequence.checkpoint.origins, other.checkpoint.origins)


def test_a_window_ends_where_the_true_drift_does(model):
    """Drift of the blocks behind the edit, from full prefills of both versions."""
    old = random_ids(1, 500)
    edits = [(128, 32, 32)]
    new = edited(old, edits)
    _, before = full_rows(model, old)
    _, after = full_rows(model, new)
    layers = sorted(sampled_layers(range(3)))
    drift = (
        (after - before)[layers].square().sum((1, 3)) / after[layers].square().sum((1, 3))
    ).sqrt()
    blocks = [float(drift[:, start : start + 32].median()) for start in range(160, 448, 32)]
    limit = sorted(blocks)[3]
    until = next(n for n, each in enumerate(blocks) if each <= limit)
    assert 0 < until
    stop = MeasuredStop(drift=limit * 1.001, step_tokens=32, most_tokens=10**6)
    policy = replace(BASE, window_tokens=1, attention_fraction=0.0, stop=stop)
    _, found = resumed(model, policy, edits)
    assert ranges_of(found.plan.labels == RowLabel.WINDOW) == ((160, 160 + 32 * (until + 1)),)


def test_without_drift_nothing_grows_and_the_longest_window_is_kept_to(model):
    loose, tight = (replace(STOPPED, stop=replace(STOPPED.stop, drift=d)) for d in (1e9, 1e-9))
    plain = resumed(model, BASE, EDITS["five"])[1].plan
    assert np.array_equal(resumed(model, loose, EDITS["five"])[1].plan.labels, plain.labels)
    plan = resumed(model, tight, EDITS["replacement"])[1].plan
    windows = ranges_of(plan.labels == RowLabel.WINDOW)
    assert [start for start, _ in windows][:1] == [161]
    assert max(stop for _, stop in windows) <= 161 + 48
    assert plan.count(RowLabel.WINDOW) > plain.count(RowLabel.WINDOW) / 5


def test_growing_windows_stop_at_the_limit_of_repair(model):
    tight = replace(
        STOPPED, stop=MeasuredStop(1e-9, most_tokens=10**6), attention_fraction=0, most_repaired=0.3
    )
    plan = resumed(model, tight, EDITS["replacement"])[1].plan
    assert 0.25 < plan.repair_ratio <= 0.3


def test_each_row_runs_once_and_in_order(model, monkeypatch):
    ran = []
    forward = ModelAdapter.forward_chunk

    def spied(self, token_ids, active, cache):
        ran.append(active.rows.positions())
        return forward(self, token_ids, active, cache)

    old = random_ids(1, 500)
    sequence = sequence_of(model)
    sequence.resume(old, RecoveryPolicy.exact())
    sequence.suspend()
    monkeypatch.setattr(ModelAdapter, "forward_chunk", spied)
    plan = sequence.resume(edited(old, EDITS["five"]), STOPPED).plan
    assert len(ran) > 3
    assert np.array_equal(np.concatenate(ran), np.flatnonzero(~plan.kept))


@pytest.mark.parametrize("policy", OPTIONS.values(), ids=OPTIONS.keys())
def test_no_row_sees_a_later_key(model, policy):
    """A NaN planted in a row of old state marks every row that reads it."""
    old = random_ids(1, 500)
    new = edited(old, EDITS["five"])
    plan = resumed(model, policy, EDITS["five"], suspended=False)[1].plan
    restored = np.flatnonzero(plan.labels == RowLabel.RESTORED)
    marker = int(restored[len(restored) // 2])
    sequence = sequence_of(model)
    sequence.resume(old, RecoveryPolicy.exact())
    shard = sequence.live_cache.shards[0]
    shard.keys[:, :, plan.aligned[marker]] = shard.values[:, :, plan.aligned[marker]] = torch.nan
    found = sequence.resume(new, policy)
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
