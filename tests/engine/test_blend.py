"""Rows chosen by their deviation while they run: what is chosen, and what the rest of them see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patchkv_agents.backends.transformers.adapter import ModelAdapter
from patchkv_agents.backends.transformers.layerwise import decoder_layers
from patchkv_agents.backends.transformers.support import rope_of, support_of
from patchkv_agents.engine.sequence import KVSequence
from patchkv_agents.errors import InputError, UnsupportedModelError
from patchkv_agents.recovery import BlendScore, CacheBlend, RecoveryPolicy, RowLabel
from patchkv_kernels import rotate_keys
from tests.backends.transformers.families import TINY, model_of

from .models import edited, full_logits, full_rows, random_ids, sequence_of, tiny_model

CACHEBLEND = RecoveryPolicy.named("cacheblend")
CACHEBLEND_RELEASED = RecoveryPolicy.named("cacheblend_released")

OLD = random_ids(1, 300)
EDITS = [(60, 10, 17), (150, 5, 0)]
NEW = edited(OLD, EDITS)
PREFIX = 60


def blended(**changes):
    """CacheBlend with some of its numbers changed."""
    return CACHEBLEND.varied(**changes)


def resumed(model, policy, *, suspended=True):
    sequence = sequence_of(model)
    sequence.resume(OLD, RecoveryPolicy.exact())
    if suspended:
        sequence.suspend()
    return sequence, sequence.resume(NEW, policy)


def rows_of(sequence):
    """Keys and values of all layers, `[layers, kv_heads, tokens, head_dim]`."""
    tokens, cache = len(sequence.token_ids), sequence.live_cache
    layers = [cache.layer(index) for index in range(len(cache.layers))]
    return tuple(torch.stack(rows)[:, :, :tokens] for rows in zip(*layers, strict=True))


def close(actual, expected, tolerance=1e-3):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("name", "policy", "suspended"),
    [(name, CACHEBLEND, True) for name in sorted(TINY)]
    + [
        ("llama", CACHEBLEND, False),
        ("llama", CACHEBLEND_RELEASED, True),
    ],
)
def test_a_blend_of_every_row_is_a_full_prefill(name, policy, suspended):
    """In every family, through decoding too. The reference has the model's own, eager attention."""
    model, reference = model_of(TINY[name]()), model_of(TINY[name](), "eager")
    sequence = KVSequence(ModelAdapter(model), support_of(model).rope)
    sequence.resume(OLD, RecoveryPolicy.exact())
    if suspended:
        sequence.suspend()
    found = sequence.resume(NEW, policy.varied(ratio=1.0), room=8)
    assert found.plan.is_exact and not sequence.checkpoint.origins.any()
    assert found.plan.recompute_ratio == 1.0
    logits = [found.logits, sequence.append(5), sequence.append(6)]
    ids = torch.tensor([*NEW, 5, 6])[None]
    with torch.inference_mode():
        expected = reference(ids, use_cache=False).logits[0, len(NEW) - 1 :]
    close(torch.stack(logits), expected)


def test_a_blend_of_every_row_of_the_embedded_model_is_a_full_prefill(smollm2_model):
    old = random_ids(1, 300, 49152)
    new = edited(old, [(100, 10, 14)], 49152)
    sequence = sequence_of(smollm2_model)
    sequence.resume(old, RecoveryPolicy.exact())
    sequence.suspend()
    close(sequence.resume(new, blended(ratio=1.0)).logits, full_logits(smollm2_model, new))


@pytest.mark.parametrize("score", list(BlendScore), ids=lambda score: score.value)
@pytest.mark.parametrize("check_layer", [1, 2])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.16])
def test_the_rows_that_deviate_most_are_chosen(ratio, check_layer, score):
    """Against full prefills of both contexts by the model alone: what was restored there, moved, is
    the old one's, and what the check layer computes is the new one's."""
    model = tiny_model("llama")
    _, found = resumed(model, blended(ratio=ratio, check_layer=check_layer, score=score))
    plan = found.plan
    old, new = full_rows(model, OLD), full_rows(model, NEW)
    moved = plan.aligned[plan.suffix]
    at = np.flatnonzero(plan.suffix)
    if score is BlendScore.VALUE:
        before, after = old[1][check_layer][:, moved], new[1][check_layer][:, at]
    else:
        rope, stale = rope_of(model), old[0][check_layer][:, moved]
        cos, sin = rope.rotation(moved, at, torch.device("cpu"))
        before, after = torch.empty_like(stale), new[0][check_layer][:, at]
        rotate_keys(stale, cos, sin, layout=rope.layout, out=before)
    deviation = (after - before).square().sum((0, 2)).numpy()
    scored = plan.labels[at] != RowLabel.TAIL
    count = int(ratio * scored.sum())
    expected = at[scored][np.argsort(-deviation[scored])[:count]]
    assert sorted(expected) == np.flatnonzero(plan.labels == RowLabel.DEVIATION).tolist()
    assert plan.count(RowLabel.TAIL) == 32 and plan.count(RowLabel.NEW) == 17
    assert plan.count(RowLabel.RESTORED) == plan.suffix.sum() - 32 - count


@pytest.mark.parametrize("suspended", [True, False], ids=["suspended", "live"])
def test_what_the_cache_holds_afterwards(suspended):
    """Up to the check layer the rows of a full prefill; behind it the old rows, moved, except where
    rows ran. The layer after the check layer (2) still has a full prefill's rows there."""
    model = model_of(TINY["qwen2"]())
    sequence, found = resumed(model, CACHEBLEND, suspended=suspended)
    plan = found.plan
    keys, values = rows_of(sequence)
    new_keys, new_values = full_rows(model, NEW)
    close(values[:2], new_values[:2], 1e-4)
    close(keys[:2], new_keys[:2], 1e-4)
    restored = plan.labels == RowLabel.RESTORED
    old_values = full_rows(model, OLD)[1]
    for layer in (2, 3):
        stale = old_values[layer][:, plan.aligned[restored]]
        close(values[layer][:, restored], stale, 1e-5)
        assert (stale - new_values[layer][:, restored]).abs().max() > 0.05
    ran, expected = values[:, :, ~plan.kept], new_values[:, :, ~plan.kept]
    close(ran[2], expected[2], 1e-4)
    assert 0.001 < (ran[3] - expected[3]).abs().max()
    origins = sequence.checkpoint.origins
    assert not origins[:PREFIX].any() and (origins[restored] == 2).all()
    first = int(np.argmax(restored))
    computed = np.flatnonzero(~plan.kept)
    assert (origins[computed] == (computed > first)).all()


def reference_blend(model, plan, visible):
    """Hidden states by the model's own eager layers, one layer at a time: all rows up to the check
    layer, then those of the plan, of which row i sees the keys before `visible[i]`."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

    decoder = model.model
    old_keys, old_values = full_rows(model, OLD)
    tokens, run = len(NEW), np.flatnonzero(~plan.kept)
    kept = plan.labels == RowLabel.RESTORED
    hidden = decoder.embed_tokens(torch.tensor(NEW)[None])
    position = torch.arange(tokens)[None]
    rope = rope_of(model)
    for index, layer in enumerate(decoder.layers):
        at = torch.arange(tokens) if index <= 1 else torch.tensor(run)
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        shape = (1, normed.shape[1], -1, attention.head_dim)
        query, key, value = (
            projection(normed).view(shape).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cos, sin = decoder.rotary_emb(hidden, position[:, at])
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        if index <= 1:
            keys, values = key, value
        else:
            keys = torch.zeros(1, key.shape[1], tokens, key.shape[3])
            values = torch.zeros_like(keys)
            prefix_keys, prefix_values = old_keys[index, :, :PREFIX], old_values[index, :, :PREFIX]
            keys[0, :, :PREFIX], values[0, :, :PREFIX] = prefix_keys, prefix_values
            moved = plan.aligned[kept]
            stale = old_keys[index, :, moved]
            rotated = torch.empty_like(stale)
            turn = rope.rotation(moved, np.flatnonzero(kept), torch.device("cpu"))
            rotate_keys(stale, *turn, layout=rope.layout, out=rotated)
            keys[0, :, kept], values[0, :, kept] = rotated, old_values[index, :, moved]
            keys[:, :, run], values[:, :, run] = key, value
        if index == 1:  # all keys and values of the check layer are at hand; fewer queries go on
            query, hidden, at = query[:, :, run], hidden[:, run], torch.tensor(run)
        limit = torch.arange(1, tokens + 1) if index == 0 else torch.tensor(visible)
        seen = torch.arange(tokens) < limit[:, None]
        groups = query.shape[1] // keys.shape[1]
        scores = query @ repeat_kv(keys, groups).transpose(2, 3) * attention.scaling
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        output = (weights @ repeat_kv(values, groups)).transpose(1, 2).flatten(2)
        hidden = hidden + attention.o_proj(output)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(decoder.norm(hidden[:, -1]))[0]


@pytest.mark.parametrize(
    "policy",
    [CACHEBLEND, CACHEBLEND_RELEASED],
    ids=lambda p: p.name,
)
@torch.inference_mode()
def test_both_masks_against_attention_written_out(policy):
    """Causal: a row at p sees p + 1 keys. Released: row i of n sees m - n + i + 1 of m, as under
    xformers' `LowerTriangularFromBottomRightMask`, which is later ones for every row but the last
    contiguous ones."""
    model = tiny_model("llama")
    sequence, found = resumed(model, policy)
    run = np.flatnonzero(~found.plan.kept)
    bottom_right = len(NEW) - len(run) + np.arange(len(run)) + 1
    causal = run + 1
    visible = causal if policy is CACHEBLEND else bottom_right
    assert (bottom_right > causal).sum() > 30
    close(found.logits, reference_blend(model, found.plan, visible), 1e-4)
    other = reference_blend(model, found.plan, bottom_right if policy is CACHEBLEND else causal)
    assert (found.logits - other).abs().max() > 0.01
    assert found.plan.sees_later == (policy is CACHEBLEND_RELEASED)
    ran = sequence.checkpoint.origins[run]
    assert ran.all() if found.plan.sees_later else not ran[:17].any()  # the new tokens


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "qwen2-window"])
def test_no_row_sees_a_later_key(name):
    """Stored rows are spoilt behind the check layer, so that the same rows are chosen: those in
    front of the spoilt ones do not notice, those behind do."""
    model = model_of(TINY[name]())
    found = []
    for spoilt in (False, True):
        sequence = KVSequence(ModelAdapter(model), support_of(model).rope)
        sequence.resume(OLD, RecoveryPolicy.exact())
        for index in (2, 3) if spoilt else ():
            for rows in sequence.live_cache.layer(index):
                rows[:, 200:230] = 9.0
        sequence.suspend()
        plan = sequence.resume(NEW, blended(ratio=0.3)).plan
        found.append((plan, *rows_of(sequence)))
    (plan, *before), (same, *after) = found
    assert np.array_equal(plan.labels, same.labels)
    chosen = np.flatnonzero(plan.labels == RowLabel.DEVIATION)
    assert (chosen < 202).sum() > 10 and np.isin(chosen, range(232, 250)).any()
    for clean, other in zip(before, after, strict=True):
        assert torch.equal(clean[:, :, :202], other[:, :, :202])
        assert not torch.equal(clean[3, :, 232:250], other[3, :, 232:250])


def test_rows_run_are_counted_layer_by_layer():
    """One of three layers ran for all rows behind the prefix, two for the chosen ones."""
    model = tiny_model("llama")
    _, found = resumed(model, CACHEBLEND)
    plan = found.plan
    behind = len(NEW) - PREFIX
    run = plan.count(RowLabel.NEW) + plan.count(RowLabel.TAIL) + plan.count(RowLabel.DEVIATION)
    assert len(plan.rows) == run
    assert plan.recompute_ratio == pytest.approx((behind + 2 * run) / (3 * behind))


def test_the_model_is_as_before_afterwards():
    """Also where a layer fails in between."""
    model = tiny_model("llama")
    layers = decoder_layers(model)
    resumed(model, CACHEBLEND)

    def fail(*_):
        raise ValueError("as if out of memory")

    sequence = sequence_of(model)
    sequence.resume(OLD, RecoveryPolicy.exact())
    handle = layers[2].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="out of memory"):
        sequence.resume(NEW, CACHEBLEND)
    handle.remove()
    for layer in layers:
        assert "forward" not in vars(layer) and not layer._forward_pre_hooks
    close(sequence.resume(NEW, RecoveryPolicy.exact()).logits, full_logits(model, NEW), 1e-4)


def test_without_stale_rows_there_is_nothing_to_choose_from():
    model = tiny_model("llama")
    sequence = sequence_of(model)
    sequence.resume(OLD, CACHEBLEND)
    appended = np.concatenate([OLD, random_ids(5, 30)])
    found = sequence.resume(appended, CACHEBLEND)
    assert found.plan.is_exact and found.plan.count(RowLabel.NEW) == 30
    close(found.logits, full_logits(model, appended), 1e-4)


def test_a_blend_can_be_resumed_from():
    """Chosen and restored rows survive a suspend, and an exact recovery computes them again."""
    model = tiny_model("qwen3")
    sequence, found = resumed(model, CACHEBLEND)
    values = rows_of(sequence)[1].clone()
    sequence.suspend()
    again = sequence.resume(np.append(NEW, 5), CACHEBLEND)
    assert torch.equal(rows_of(sequence)[1][2][:, 77:-1], values[2][:, 77:])
    assert not again.plan.is_exact
    exact = sequence.resume(NEW, RecoveryPolicy.exact())
    close(exact.logits, full_logits(model, NEW), 1e-4)


def test_what_cannot_be_done_is_said():
    model = tiny_model("llama")
    with pytest.raises(InputError, match="has 3 layers"):
        resumed(model, blended(check_layer=3))
    model.model.layers = torch.nn.ModuleList(list(model.model.layers)[:2])
    with pytest.raises(UnsupportedModelError, match="other than CacheBlend"):
        decoder_layers(model)
    for wrong in ({"ratio": 1.5}, {"check_layer": 0}):
        with pytest.raises(InputError):
            CacheBlend(**wrong)
