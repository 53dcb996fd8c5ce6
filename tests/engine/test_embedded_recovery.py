"""The embedded model, at the lengths that the project promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from patchkv_agents.backends.transformers.support import rope_of
from patchkv_agents.recovery import RecoveryPolicy, Window
from patchkv_kernels import rotate_keys

from .models import edited, full_logits, random_ids, sequence_of

VOCABULARY = 49152
WHOLE_SUFFIX = RecoveryPolicy("whole", Window(10**6, tail_tokens=64, block_size=32))


def one_edit(tokens, removed, added):
    return [(tokens // 5, removed, added)]


def five_edits(tokens):
    kinds = [(3, 9), (8, 0), (0, 12), (5, 5), (1, 2)]
    return [(tokens * (index + 1) // 7, *kind) for index, kind in enumerate(kinds)]


EDITS = {
    "replacement": lambda tokens: one_edit(tokens, 10, 14),
    "insertion": lambda tokens: one_edit(tokens, 0, 15),
    "deletion": lambda tokens: one_edit(tokens, 15, 0),
    "five": five_edits,
}


LENGTHS = [100, *(pytest.param(tokens, marks=pytest.mark.slow) for tokens in (1000, 4000))]


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("tokens", LENGTHS, ids=str)
def test_repairing_the_whole_suffix_is_a_full_prefill(smollm2_model, tokens, kind):
    old = random_ids(tokens, tokens, VOCABULARY)
    new = edited(old, EDITS[kind](tokens), VOCABULARY)
    check_whole_suffix(smollm2_model, old, new)


def test_repairing_the_whole_suffix_of_4000_tokens_is_a_full_prefill(smollm2_model):
    """One case at full length in the fast suite: five edits, and every kind among them."""
    old = random_ids(4000, 4000, VOCABULARY)
    check_whole_suffix(smollm2_model, old, edited(old, five_edits(4000), VOCABULARY))


def check_whole_suffix(model, old, new):
    sequence = sequence_of(model)
    sequence.resume(old, RecoveryPolicy.exact())
    sequence.suspend()
    resumed = sequence.resume(new, WHOLE_SUFFIX)
    assert resumed.plan.is_exact
    torch.testing.assert_close(resumed.logits, full_logits(model, new), atol=1e-3, rtol=0)


@pytest.mark.parametrize("delta", [-4000, -1777, -32, -1, 0, 1, 32, 1777, 4000])
def test_moved_keys_are_the_keys_computed_at_the_new_positions(smollm2_model, delta):
    """Keys before rotation from the projections of all layers; rotated by the model's own code at
    the old and at the new positions."""
    unrotated = []
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda *call: unrotated.append(call[2]))
        for layer in smollm2_model.model.layers
    ]
    try:
        ids = torch.from_numpy(random_ids(3, 97, VOCABULARY))[None]
        with torch.inference_mode():
            smollm2_model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    keys = torch.stack([key[0].unflatten(-1, (3, 64)).transpose(0, 1) for key in unrotated])
    written = np.arange(4050, 4050 + 97)

    def at(positions):
        cos, sin = smollm2_model.model.rotary_emb(keys, torch.from_numpy(positions)[None])
        return apply_rotary_pos_emb(keys, keys, cos, sin)[1]

    stored = at(written)
    cos, sin = rope_of(smollm2_model).rotation(written, written + delta, torch.device("cpu"))
    moved = torch.empty_like(stored)
    rotate_keys(stored, cos, sin, layout=rope_of(smollm2_model).layout, out=moved)
    torch.testing.assert_close(moved, at(written + delta), atol=1e-4, rtol=0)
    if delta == 0:
        assert torch.equal(moved, stored)


def test_a_suffix_restored_after_a_real_move_is_what_was_stored_moved(smollm2_model):
    """Through checkpoint and cache: 400 tokens removed and 400 added in front of the suffix."""
    old = random_ids(5, 900, VOCABULARY)
    sequence = sequence_of(smollm2_model)
    sequence.resume(old, RecoveryPolicy.exact())
    first = sequence.live_cache.shards[0].keys[:, :, 500:900].clone()
    direct = RecoveryPolicy("direct", Window(0, tail_tokens=1))
    shorter = edited(old, [(50, 400, 3)], VOCABULARY)
    sequence.resume(shorter, direct)
    assert not torch.allclose(
        sequence.live_cache.shards[0].keys[:, :, 103:502], first[:, :, :399], atol=0.1
    )
    longer = edited(shorter, [(50, 3, 400)], VOCABULARY)
    longer = np.concatenate([longer[:450], old[450:]])
    sequence.resume(longer, direct)
    # Back where they were, restored from the first payload: bit for bit.
    assert torch.equal(sequence.live_cache.shards[0].keys[:, :, 500:899], first[:, :, :399])
