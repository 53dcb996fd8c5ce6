"""Tiny random-weight models of the supported classes, and edits of random token sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from patchkv_agents.backends.transformers.adapter import ModelAdapter, plain_call
from patchkv_agents.backends.transformers.support import rope_of
from patchkv_agents.engine import Engine
from patchkv_agents.engine.sequence import KVSequence

VOCABULARY = 101

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,  # logits of standard deviation 1 and more: a wrong key shows
    "bos_token_id": None,
    "eos_token_id": None,
}

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

BUILDERS = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    ),
    "llama-one-kv-head": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, num_attention_heads=3, num_key_value_heads=1, head_dim=16)
    ),
    "llama-llama3-rope": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rope_parameters=LLAMA3_ROPE,
        )
    ),
    "llama-yarn-rope": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rope_parameters=YARN_ROPE,
        )
    ),
    "llama-linear-rope": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rope_parameters=LINEAR_ROPE,
        )
    ),
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, **{**HEADS, "num_key_value_heads": 4}, sliding_window=None)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, num_attention_heads=6, num_key_value_heads=3)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, num_attention_heads=6, num_key_value_heads=3, head_dim=24)
    ),
}


def tiny_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = BUILDERS[name]()
    return model.eval().requires_grad_(False)


def tiny_engine(tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Engine:
    """Random weights behind a real vocabulary and chat template."""
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": max_tokens}
    config = LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    return Engine(LlamaForCausalLM(config).eval(), tokenizer)


def sequence_of(model: PreTrainedModel, **options: Any) -> KVSequence:
    return KVSequence(ModelAdapter(model), rope_of(model), **options)


def full_logits(model: PreTrainedModel, token_ids: NDArray[np.int64]) -> torch.Tensor:
    """Logits of the last token by a plain call of the model, without cache: the reference."""
    with torch.inference_mode():
        logits = model(torch.tensor(token_ids)[None], use_cache=False, logits_to_keep=1).logits
    return logits[0, -1]


def full_rows(
    model: PreTrainedModel, token_ids: NDArray[np.int64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, `[layers, kv_heads, tokens, head_dim]`, by a plain call of the model."""
    with torch.inference_mode():
        output = model(torch.tensor(token_ids)[None], use_cache=True)
    cache = output.cache if hasattr(output, "cache") else output.past_key_values
    layers = cache.layers
    return (
        torch.stack([layer.keys[0] for layer in layers]),
        torch.stack([layer.values[0] for layer in layers]),
    )


def plain_rows(
    model: PreTrainedModel, token_ids: NDArray[np.int64], *, shift: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`plain_call`, all layers together: `[layers, kv_heads, tokens, head_dim]`."""
    _, rows = plain_call(model, token_ids, shift=shift)
    keys, values = zip(*rows, strict=True)
    return torch.stack(keys), torch.stack(values)


def random_ids(seed: int, tokens: int, vocabulary: int = VOCABULARY) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(3, vocabulary, tokens)


def edited(
    old: NDArray[np.int64], edits: list[tuple[int, int, int]], vocabulary: int = VOCABULARY
) -> NDArray[np.int64]:
    """`old` with `removed` tokens at `at` replaced by `added` random ones, for each edit."""
    rng = np.random.default_rng(7)
    pieces, cursor = [], 0
    for at, removed, added in edits:
        pieces += [old[cursor:at], rng.integers(3, vocabulary, added)]
        cursor = at + removed
    return np.concatenate([*pieces, old[cursor:]])
