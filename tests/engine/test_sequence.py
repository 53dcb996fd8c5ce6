"""Recovering edited token sequences: exactness, origins, later edits, failures."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from patchkv_agents.backends.transformers.adapter import ModelAdapter
from patchkv_agents.backends.transformers.capture import AttentionCapture
from patchkv_agents.engine.stopwatch import Stopwatch
from patchkv_agents.ranges import RowSet
from patchkv_agents.recovery import Blocks, RecoveryPolicy, RowLabel, Window

from ..checkpoint.rows import stored_rows
from .models import BUILDERS, edited, full_logits, full_rows, random_ids, sequence_of, tiny_model

WHOLE_SUFFIX = RecoveryPolicy("whole", Window(10**6, tail_tokens=64, block_size=32))
PATCH = RecoveryPolicy("patch", Window(40, tail_tokens=16, block_size=32, rule=Blocks(0.05)))

EDITS = {
    "replacement": [(120, 30, 41)],
    "insertion": [(120, 0, 37)],
    "deletion": [(120, 37, 0)],
    "same length": [(120, 20, 20)],
    "five": [(60, 5, 9), (130, 20, 0), (210, 0, 33), (300, 17, 17), (390, 3, 1)],
    "appended": [(500, 0, 40)],
    "truncated": [(300, 200, 0)],
    "first token": [(0, 1, 2)],
}


@pytest.fixture(scope="module", params=sorted(BUILDERS))
def model(request):
    return tiny_model(request.param)


def close(actual, expected, tolerance=1e-4):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def check_exact_rows(model, sequence):
    """Every live row that is called exact is the row of a full prefill."""
    exact = sequence.checkpoint.origins == 0
    tokens = len(exact)
    keys, values = full_rows(model, sequence.token_ids)
    cache = sequence.live_cache
    close(cache.shards[0].keys[:, :, :tokens][:, :, exact], keys[:, :, exact])
    close(cache.shards[0].values[:, :, :tokens][:, :, exact], values[:, :, exact])
    return int(exact.sum())


@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS.keys())
def test_repairing_the_whole_suffix_is_a_full_prefill(model, edits):
    check_whole_suffix(model, WHOLE_SUFFIX, edits, suspended=True)


@pytest.mark.parametrize("policy", [RecoveryPolicy.exact(), WHOLE_SUFFIX], ids=lambda p: p.name)
@pytest.mark.parametrize("suspended", [True, False], ids=["suspended", "live"])
@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS.keys())
def test_an_exact_recovery_starts_from_stored_or_from_live_rows(policy, suspended, edits):
    check_whole_suffix(tiny_model("llama"), policy, edits, suspended=suspended)


def check_whole_suffix(model, policy, edits, *, suspended):
    old = random_ids(1, 500)
    new = edited(old, edits)
    sequence = sequence_of(model)
    close(sequence.resume(old, RecoveryPolicy.exact()).logits, full_logits(model, old))
    if suspended:
        sequence.suspend()
        assert sequence.checkpoint.payload_bytes > 0
    resumed = sequence.resume(new, policy)
    assert resumed.plan.is_exact
    assert check_exact_rows(model, sequence) == len(new)
    close(resumed.logits, full_logits(model, new))


@pytest.mark.parametrize("suspended", [True, False], ids=["suspended", "live"])
@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS.keys())
def test_a_restored_row_is_the_old_state_moved(model, suspended, edits):
    """Rows of F: values bit for bit, keys rotated to what the model would write there."""
    old = random_ids(1, 500)
    new = edited(old, edits)
    sequence = sequence_of(model)
    sequence.resume(old, RecoveryPolicy.exact())
    old_values = sequence.live_cache.shards[0].values[:, :, :500].clone()
    old_keys = sequence.live_cache.shards[0].keys[:, :, :500].clone()
    if suspended:
        sequence.suspend()
    plan = sequence.resume(new, PATCH).plan
    cache = sequence.live_cache
    kept = np.flatnonzero(plan.kept)
    source = plan.source[kept]
    assert torch.equal(cache.shards[0].values[:, :, kept], old_values[:, :, source])
    inv_freq = model.model.rotary_emb.inv_freq.double()
    # The model's own angles, rounded to float32 as it rounds them.
    angle = (torch.from_numpy(kept).float()[:, None] * inv_freq.float()).double()
    angle -= (torch.from_numpy(source).float()[:, None] * inv_freq.float()).double()
    first, second = old_keys[:, :, source].double().chunk(2, dim=-1)
    expected = torch.cat(
        [
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        ],
        dim=-1,
    )
    close(cache.shards[0].keys[:, :, kept].double(), expected, 1e-4)
    unmoved = kept[kept == source]
    assert torch.equal(cache.shards[0].keys[:, :, unmoved], old_keys[:, :, unmoved])


def test_suspended_and_live_recovery_agree(model):
    old, new = random_ids(1, 500), edited(random_ids(1, 500), EDITS["five"])
    live, suspended = sequence_of(model), sequence_of(model)
    for sequence in (live, suspended):
        sequence.resume(old, RecoveryPolicy.exact())
    suspended.suspend()
    close(live.resume(new, PATCH).logits, suspended.resume(new, PATCH).logits, 1e-4)


def test_decoding_continues_exactly_after_an_exact_recovery(model):
    old, new = random_ids(1, 500), edited(random_ids(1, 500), EDITS["replacement"])
    sequence = sequence_of(model)
    sequence.resume(old, RecoveryPolicy.exact())
    sequence.suspend()
    logits = sequence.resume(new, WHOLE_SUFFIX).logits
    for _ in range(32):
        token = int(logits.argmax())
        logits = sequence.append(token)
        new = np.append(new, token)
    close(logits, full_logits(model, new))
    assert np.array_equal(sequence.token_ids, new)


def test_decoding_past_the_reserved_room_keeps_every_row(model):
    old = random_ids(1, 250)
    sequence = sequence_of(model)
    logits = sequence.resume(old, RecoveryPolicy.exact()).logits
    ids = old
    for _ in range(12):  # crosses the capacity step at 256
        token = int(logits.argmax())
        logits = sequence.append(token)
        ids = np.append(ids, token)
    close(logits, full_logits(model, ids))


def test_a_thread_of_edits_stays_right(model):
    """Third and fourth version, with decoding and suspending in between: once everything is
    recomputed the state is a full prefill's again, so no edit before has left a wrong row.
    """
    sequence = sequence_of(model)
    ids = random_ids(1, 500)
    sequence.resume(ids, RecoveryPolicy.exact())
    for step, edits in enumerate([EDITS["replacement"], EDITS["five"], EDITS["deletion"]]):
        for token in (5, 6, 7):
            sequence.append(token)
        if step % 2:
            sequence.suspend()
        ids = edited(sequence.token_ids, edits)
        plan = sequence.resume(ids, PATCH).plan
        assert plan.count(RowLabel.RESTORED) > 0
        assert np.array_equal(sequence.token_ids, ids)
        assert check_exact_rows(model, sequence) > plan.count(RowLabel.PREFIX)
    final = edited(ids, [(400, 4, 9)])
    resumed = sequence.fork().resume(final, RecoveryPolicy.exact())
    close(resumed.logits, full_logits(model, final))


def test_stored_rows_are_never_written_again(model):
    """A row that is restored again and again keeps its first bytes: errors cannot pile up."""
    sequence = sequence_of(model)
    ids = random_ids(1, 500)
    sequence.resume(ids, RecoveryPolicy.exact())
    sequence.suspend()
    rows = np.arange(320, 352)
    before = stored_rows(sequence.checkpoint, rows)
    no_attention = PATCH.varied(rule=None)
    for edits in range(1, 9):
        ids = edited(ids, [(100, 3, 5)])
        sequence.resume(ids, no_attention)
        sequence.suspend()
        assert stored_rows(sequence.checkpoint, rows + 2 * edits) == before
    assert len(sequence.checkpoint) == 516
    assert sequence.checkpoint.stored.all()


def test_origins_follow_the_edits():
    model = tiny_model("llama")
    sequence = sequence_of(model)
    old = random_ids(1, 500)
    sequence.resume(old, RecoveryPolicy.exact())
    new = edited(old, EDITS["replacement"])
    plan = sequence.resume(new, PATCH).plan
    origins = sequence.checkpoint.origins
    restored = np.flatnonzero(plan.labels == RowLabel.RESTORED)
    # Everything up to the first restored row saw exact keys only, the window included.
    assert not origins[: restored[0]].any()
    assert (plan.labels[: restored[0]] == RowLabel.WINDOW).any()
    assert (origins[restored] == 2).all()  # stale, one generation
    behind = np.arange(len(new)) > restored[0]
    assert (origins[behind & ~np.isin(np.arange(len(new)), restored)] == 1).all()
    sequence.append(9)
    assert sequence.checkpoint.origins[-1] == 1

    # The same context again: nothing ages, and what is stale is not called a prefix hit.
    again = sequence.resume(np.append(new, 9), PATCH).plan
    assert again.count(RowLabel.PREFIX) == restored[0]
    assert sequence.checkpoint.origins.max() == 2
    # A second edit ages the rows behind it.
    sequence.resume(edited(new, EDITS["replacement"]), PATCH)
    assert sequence.checkpoint.origins.max() == 3


def test_exact_recovery_reuses_no_stale_row():
    model = tiny_model("qwen2")
    sequence = sequence_of(model)
    old = random_ids(1, 500)
    sequence.resume(old, RecoveryPolicy.exact())
    new = edited(old, EDITS["replacement"])
    stale = sequence.resume(new, PATCH)
    assert not stale.plan.is_exact
    resumed = sequence.resume(new, RecoveryPolicy.exact())
    close(resumed.logits, full_logits(model, new))
    assert resumed.plan.is_exact and not sequence.checkpoint.origins.any()


def test_an_identical_context_computes_one_token(model):
    ids = random_ids(1, 500)
    sequence = sequence_of(model)
    first = sequence.resume(ids, RecoveryPolicy.exact()).logits
    sequence.suspend()
    for policy in (RecoveryPolicy.exact(), PATCH):
        resumed = sequence.resume(ids, policy)
        assert len(resumed.plan.rows) == 1 and resumed.plan.count(RowLabel.PREFIX) == 499
        close(resumed.logits, first, 1e-4)


@pytest.mark.parametrize("live", [True, False])
def test_a_resume_that_fails_loses_nothing_stored(live, monkeypatch):
    model = tiny_model("llama")
    sequence = sequence_of(model)
    old, new = random_ids(1, 500), edited(random_ids(1, 500), EDITS["five"])
    sequence.resume(old, RecoveryPolicy.exact())
    sequence.suspend()
    if live:
        sequence.resume(old, RecoveryPolicy.exact())
    with monkeypatch.context() as patched:
        patched.setattr(ModelAdapter, "forward_rows", _fail)
        with pytest.raises(MemoryError):
            sequence.resume(new, PATCH)
    assert not sequence.is_live
    assert np.array_equal(sequence.token_ids, old)
    plan = sequence.resume(new, WHOLE_SUFFIX).plan
    assert plan.count(RowLabel.PREFIX) == 60


def test_rows_that_were_never_stored_are_computed_anew_after_a_failure(monkeypatch):
    model = tiny_model("llama")
    sequence = sequence_of(model)
    old, new = random_ids(1, 500), edited(random_ids(1, 500), EDITS["appended"])
    sequence.resume(old, RecoveryPolicy.exact())
    with monkeypatch.context() as patched:
        patched.setattr(ModelAdapter, "forward_rows", _fail)
        with pytest.raises(MemoryError):
            sequence.resume(new, PATCH)
    resumed = sequence.resume(new, PATCH)
    assert len(resumed.plan.rows) == len(new)
    close(resumed.logits, full_logits(model, new))


def _fail(*args, **kwargs):
    raise MemoryError("no room")


def test_scores_are_the_attention_that_the_last_prompt_tokens_paid():
    """Against the eager attention's own weights, summed over the sampled layers."""
    model = tiny_model("llama")
    ids = random_ids(1, 300)
    sequence = sequence_of(model)
    sequence.resume(ids, RecoveryPolicy.exact())
    sequence.suspend()
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = model(torch.from_numpy(ids)[None], output_attentions=True).attentions
    mass = sum(layer[0, :, -32:].sum(dim=(0, 1)) for layer in weights)
    mass[-32:] = 0
    close(torch.tensor(sequence.checkpoint.scores), mass / mass.sum(), 1e-5)
    assert sequence.checkpoint.scores.sum() == pytest.approx(1, abs=1e-5)


def test_a_caller_cannot_reach_into_the_state():
    """An array written by a caller changed a fork's tokens, and with them what was called exact."""
    sequence = sequence_of(tiny_model("llama"))
    ids = random_ids(1, 100)
    sequence.resume(ids, RecoveryPolicy.exact())
    ids[50] = 5  # the caller's own array stays the caller's
    assert sequence.token_ids[50] == random_ids(1, 100)[50]
    plan = sequence.resume(random_ids(1, 100), PATCH).plan
    for array in (sequence.token_ids, sequence.checkpoint.origins, plan.labels, plan.aligned):
        with pytest.raises(ValueError, match="read-only"):
            array[50] = 5


def test_a_cache_that_is_far_too_large_is_given_back():
    model = tiny_model("llama")
    sequence = sequence_of(model)
    sequence.resume(random_ids(1, 1500), RecoveryPolicy.exact(), room=10**6)
    assert sequence.live_cache.capacity <= 1500 + 1024 + 256
    short = random_ids(1, 1500)[:200]
    resumed = sequence.resume(short, RecoveryPolicy.exact())
    assert sequence.live_cache.capacity == 256
    close(resumed.logits, full_logits(model, short))


def test_scores_of_recomputed_rows_survive_when_few_queries_run():
    """With one query a step, the blocks that window and tail recompute kept no score at all, and
    the next edit chose others."""
    policy = RecoveryPolicy(
        "one query", Window(40, tail_tokens=1, block_size=32, rule=Blocks(0.05))
    )
    sequence = sequence_of(tiny_model("llama"))
    ids = random_ids(1, 400)
    sequence.resume(ids, RecoveryPolicy.exact())
    sequence.suspend()
    before = sequence.checkpoint.scores
    new = edited(ids, [(100, 2, 2)])
    plan = sequence.resume(new, policy).plan
    sequence.suspend()
    window = np.flatnonzero(plan.labels == RowLabel.WINDOW)
    assert np.corrcoef(sequence.checkpoint.scores[window], before[plan.aligned[window]])[0, 1] > 0.9


def test_scores_move_with_their_tokens_when_few_queries_run():
    model = tiny_model("llama")
    ids = random_ids(1, 300)
    sequence = sequence_of(model)
    sequence.resume(ids, RecoveryPolicy.exact())
    sequence.suspend()
    before = sequence.checkpoint.scores
    sequence.resume(ids, RecoveryPolicy.exact())  # one row runs
    sequence.suspend()
    after = sequence.checkpoint.scores
    assert np.corrcoef(before[:268], after[:268])[0, 1] > 0.95


def test_aggregating_scores_is_part_of_planning(monkeypatch):
    """Where the old state is live still: it was once in none of the times."""
    sequence = sequence_of(tiny_model("llama"))
    sequence.resume(random_ids(1, 40), RecoveryPolicy.exact())
    scores = AttentionCapture.scores

    def slow(self, tokens):
        time.sleep(0.2)
        return scores(self, tokens)

    monkeypatch.setattr(AttentionCapture, "scores", slow)
    watch = Stopwatch()
    sequence.resume(random_ids(1, 50), RecoveryPolicy.exact(), watch=watch)
    assert watch.ms("planning") > 200


def test_a_scattered_row_set_is_cut_into_chunks_in_order():
    rows = RowSet(((3, 10), (20, 21), (30, 45)))
    chunks = list(rows.chunks(4))
    assert np.array_equal(np.concatenate([c.positions() for c in chunks]), rows.positions())
    assert [len(chunk) for chunk in chunks] == [4, 4, 4, 4, 4, 3]
