"""Models that cannot be recovered are refused with the reason."""

from __future__ import annotations

import pytest
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from patchkv_agents.engine.support import rope_of
from patchkv_agents.errors import UnsupportedModelError

from .models import BUILDERS, SIZES, tiny_model

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_supported_classes_give_their_own_frequencies(name):
    model = tiny_model(name)
    rope = rope_of(model)
    assert rope.inv_freq.tolist() == model.model.rotary_emb.inv_freq.tolist()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(**SIZES, **HEADS, sliding_window=64), "sliding-window"),
        (
            Qwen2Config(
                **SIZES, **HEADS, use_sliding_window=True, sliding_window=64, max_window_layers=1
            ),
            "sliding-window",
        ),
        (LlamaConfig(**SIZES, **HEADS, rope_parameters=DYNAMIC), "RoPE type 'dynamic'"),
        (Gemma2Config(**SIZES, **HEADS, head_dim=8), "not been verified"),
        (GPT2Config(n_embd=48, n_layer=1, n_head=2, vocab_size=101), "not been verified"),
    ],
    ids=["mistral-sliding", "qwen2-sliding", "dynamic-rope", "gemma2", "gpt2"],
)
def test_what_cannot_be_recovered_is_refused_with_the_reason(config, reason):
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=reason):
        rope_of(model)
