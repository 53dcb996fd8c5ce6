"""Unknown architectures: what the probe finds, and what it must not let pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    AttentionInterface,
    BloomConfig,
    Cohere2Config,
    GPT2Config,
    GPTNeoXConfig,
    Qwen2Config,
)

from patchkv_agents.backends.transformers import row_attention
from patchkv_agents.backends.transformers.probe import probe
from patchkv_agents.backends.transformers.support import support_of
from patchkv_agents.backends.transformers.verdict import SupportLevel
from patchkv_kernels import RopeLayout

from .families import FEW_HEADS, HEADS, SIZES, TINY, model_of


def unknown(name="qwen2"):
    """A model that is what its family is, under a name that nobody knows."""
    model = model_of(TINY[name]())
    model.config.model_type = "strange"
    return model


@pytest.mark.parametrize(
    ("config", "layout", "rows"),
    [
        (Cohere2Config(**SIZES, **HEADS, sliding_window=20), RopeLayout.INTERLEAVED, (4, 8)),
        (GPTNeoXConfig(**SIZES, num_attention_heads=3), RopeLayout.HALF_SPLIT, (2,)),
    ],
    ids=["cohere2", "gpt_neox"],
)
def test_the_rope_of_an_unknown_architecture_is_found(config, layout, rows):
    """Windows and layers without RoPE; a quarter of each head."""
    support = support_of(model_of(config))
    assert support.verdict.level is SupportLevel.APPROXIMATE
    assert support.rope.layout is layout and support.rope.inv_freq.shape == rows


def test_learned_positions_leave_exact_reuse():
    verdict, rope = probe(model_of(GPT2Config(n_embd=48, n_layer=2, n_head=3, vocab_size=101)))
    assert verdict.level is SupportLevel.EXACT and rope is None
    assert "no rotated keys" in verdict.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_probe_leaves_the_model_as_it_was(dtype):
    model = unknown("smollm3").to(dtype)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    verdict, rope = probe(model)
    assert verdict.level is SupportLevel.APPROXIMATE and rope.inv_freq.shape == (4, 8)
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def refused(model, reason):
    verdict, rope = probe(model)
    assert verdict.level is SupportLevel.REFUSED and rope is None
    assert reason in verdict.reason, verdict.reason


def test_attention_of_its_own_is_refused():
    refused(model_of(BloomConfig(hidden_size=48, n_layer=2, n_head=3)), "cannot be replaced")


def test_state_beyond_keys_and_values_is_refused():
    """A layer that mixes in the row before, as token-shift and convolution layers do."""
    model = unknown()

    def shifted(module, arguments):
        (hidden,) = arguments
        return (hidden + torch.nn.functional.pad(hidden[:, :-1], (0, 0, 1, 0)),)

    model.model.layers[1].register_forward_pre_hook(shifted)
    refused(model, "one run at a time")


def test_a_window_that_the_attention_call_does_not_name_is_refused():
    """Wider than the probe is long, so that no result shows it: the mask itself is asked."""
    model = model_of(
        Qwen2Config(
            **SIZES, **FEW_HEADS, use_sliding_window=True, sliding_window=500, max_window_layers=2
        )
    )
    assert probe(model)[0].level is SupportLevel.APPROXIMATE
    model.model.layers[3].self_attn.sliding_window = None
    refused(model, "the mask of layer 3 is not causal")
    model.model.layers[3].self_attn.sliding_window = 499
    refused(model, "the mask of layer 3 is not a causal window of 499 tokens")


def test_positions_that_are_not_rotations_leave_exact_reuse():
    """Angles that grow with the square of the position: no two shifts are one rotation."""
    model = unknown()
    rotary = model.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, position_ids: plain(x, position_ids * position_ids)
    verdict, rope = probe(model)
    assert verdict.level is SupportLevel.EXACT and rope is None


def test_frequencies_that_no_module_holds_leave_exact_reuse():
    model = unknown()
    rotary = model.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, position_ids: plain(x, position_ids * 3)
    assert probe(model)[0].level is SupportLevel.EXACT


@pytest.mark.parametrize("fault", ["later keys", "no keys before"])
def test_a_wrong_mask_of_our_own_is_noticed(fault, monkeypatch):
    """Two public CacheBlend codes align the mask of packed rows to the bottom right of all keys,
    so that rows see later ones: right for a prefill, wrong for scattered rows."""

    def broken(module, query, key, value, attention_mask, scaling=None, **kwargs):
        active = row_attention.active_rows()
        if active is None:
            return row_attention._attention(
                module, query, key, value, attention_mask, scaling=scaling, **kwargs
            )
        right, _ = row_attention._attention(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        if query.shape[2] == key.shape[2]:
            return right, None
        if fault == "no keys before":
            key, value = key[:, :, -query.shape[2] :], value[:, :, -query.shape[2] :]
        wrong = row_attention.run_attention(query, key, value, scaling=scaling)
        return wrong.transpose(1, 2), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "patchkv", broken)
    refused(unknown(), "one run at a time")


def test_code_that_fails_is_refused_with_its_words():
    model = unknown()

    def fail(module, arguments):
        raise RuntimeError("no such thing\nand more")

    model.model.layers[0].register_forward_pre_hook(fail)
    refused(model, "a probe of it failed (no such thing)")


def test_equal_frequencies_are_one_row():
    _, rope = probe(unknown("mistral"))
    assert rope is not None and rope.inv_freq.ndim == 1 and np.isfinite(rope.inv_freq).all()
