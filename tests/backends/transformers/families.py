"""Configurations of every verified family: tiny ones, and ones with a published model's numbers.

Of a published model, what concerns attention is kept: head counts, head_dim, RoPE parameters,
windows, multipliers (from the models' public `config.json`); width of the residual stream, depth,
experts and vocabulary are cut down, and weights are random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from tests.engine.models import HEADS, LINEAR_ROPE, LLAMA3_ROPE, SIZES, VOCABULARY, YARN_ROPE

WINDOW = 20
SIZES = {**SIZES, "num_hidden_layers": 4, "pad_token_id": None}
FEW_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1}  # of 16 channels
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GLM_EXPERTS = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 16}


def rope(theta: float, **others: float | str) -> dict[str, float | str]:
    return {"rope_type": "default", "rope_theta": theta, **others}


HALF = rope(1e4, partial_rotary_factor=0.5)

TINY: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma2": lambda: Gemma2Config(**SIZES, **HEADS, **GEMMA, attn_logit_softcapping=2.0),
    "gemma3": lambda: Gemma3Config(
        text_config={**SIZES, **HEADS, **GEMMA, "sliding_window_pattern": 2},
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "intermediate_size": 16,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=1,
    ),
    "gemma3_text": lambda: Gemma3TextConfig(**SIZES, **HEADS, **GEMMA, sliding_window_pattern=2),
    "glm": lambda: GlmConfig(**SIZES, **HEADS, rope_parameters=HALF),
    "glm4": lambda: Glm4Config(**SIZES, **HEADS, rope_parameters=HALF),
    "glm4_moe": lambda: Glm4MoeConfig(
        **SIZES, **HEADS, **GLM_EXPERTS, rope_parameters=HALF, use_qk_norm=True
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    "granite": lambda: GraniteConfig(
        **SIZES,
        **FEW_HEADS,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "llama": lambda: LlamaConfig(**SIZES, **HEADS, rope_parameters=LLAMA3_ROPE),
    "llama-linear": lambda: LlamaConfig(**SIZES, **HEADS, rope_parameters=LINEAR_ROPE),
    "llama-yarn": lambda: LlamaConfig(**SIZES, **HEADS, rope_parameters=YARN_ROPE),
    "mistral": lambda: MistralConfig(**SIZES, **HEADS, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**SIZES, **HEADS, sliding_window=WINDOW),
    "olmo2": lambda: Olmo2Config(**SIZES, **FEW_HEADS),
    "phi3": lambda: Phi3Config(
        **SIZES, **FEW_HEADS, rope_parameters=rope(1e4, partial_rotary_factor=0.75)
    ),
    "qwen2": lambda: Qwen2Config(**SIZES, **FEW_HEADS),
    "qwen2-window": lambda: Qwen2Config(
        **SIZES,
        **FEW_HEADS,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, **HEADS),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, num_experts=4),
    "smollm3": lambda: SmolLM3Config(**SIZES, **FEW_HEADS, no_rope_layer_interval=2),
}


def heads(query: int, key: int, head_dim: int = 128) -> dict[str, Any]:
    return {
        "num_attention_heads": query,
        "num_key_value_heads": key,
        "head_dim": head_dim,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


PUBLISHED: dict[str, Callable[[], PreTrainedConfig]] = {
    "Gemma-2-9b": lambda: Gemma2Config(
        **heads(16, 8, 256), sliding_window=4096, query_pre_attn_scalar=256
    ),
    "gemma-3-1b": lambda: Gemma3TextConfig(
        **{**heads(4, 1, 256), "num_hidden_layers": 6},
        sliding_window=512,
        query_pre_attn_scalar=256,
        rope_parameters={"sliding_attention": rope(1e4), "full_attention": rope(1e6)},
    ),
    "gemma-3-4b": lambda: Gemma3TextConfig(
        **{**heads(8, 4, 256), "num_hidden_layers": 6},
        sliding_window=1024,
        query_pre_attn_scalar=256,
        rope_parameters={
            "sliding_attention": rope(1e4),
            "full_attention": {**rope(1e6), "rope_type": "linear", "factor": 8.0},
        },
    ),
    "glm-4-9b-chat": lambda: GlmConfig(
        **heads(32, 2), max_position_embeddings=131072, attention_bias=True, rope_parameters=HALF
    ),
    "GLM-4-9B-0414": lambda: Glm4Config(
        **heads(32, 2), max_position_embeddings=32768, attention_bias=True, rope_parameters=HALF
    ),
    "GLM-4.5": lambda: Glm4MoeConfig(
        **heads(96, 8),
        **GLM_EXPERTS,
        max_position_embeddings=131072,
        attention_bias=True,
        use_qk_norm=True,
        rope_parameters=rope(1e6, partial_rotary_factor=0.5),
    ),
    "granite-3.3-8b": lambda: GraniteConfig(
        **heads(32, 8),
        max_position_embeddings=131072,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.0078125,
        logits_scaling=16.0,
        rope_parameters=rope(1e7),
    ),
    "Llama-3.3-70B": lambda: LlamaConfig(
        **heads(64, 8),
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "Mistral-7B-v0.1": lambda: MistralConfig(
        **heads(32, 8), max_position_embeddings=32768, sliding_window=4096, rope_theta=1e4
    ),
    "Mistral-Small-24B": lambda: MistralConfig(
        **heads(32, 8),
        max_position_embeddings=32768,
        sliding_window=None,
        rope_parameters=rope(1e8),
    ),
    "OLMo-2-32B": lambda: Olmo2Config(
        **heads(40, 8), max_position_embeddings=4096, rope_parameters=rope(5e5)
    ),
    "Phi-3-mini-4k": lambda: Phi3Config(
        **heads(32, 32, 96),
        max_position_embeddings=4096,
        sliding_window=2047,
        rope_parameters=rope(1e4),
    ),
    "phi-4": lambda: Phi3Config(
        **heads(40, 10), max_position_embeddings=16384, rope_parameters=rope(2.5e5)
    ),
    "Qwen2.5-7B": lambda: Qwen2Config(
        **heads(28, 4), max_position_embeddings=32768, rope_parameters=rope(1e6)
    ),
    "Qwen2.5-7B with YaRN": lambda: Qwen2Config(
        **heads(28, 4),
        max_position_embeddings=32768,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    ),
    "Qwen3-32B": lambda: Qwen3Config(
        **heads(64, 8), max_position_embeddings=40960, rope_parameters=rope(1e6)
    ),
    "Qwen3-30B-A3B": lambda: Qwen3MoeConfig(
        **heads(32, 4),
        **EXPERTS,
        num_experts=4,
        max_position_embeddings=40960,
        rope_parameters=rope(1e6),
    ),
    "SmolLM3-3B": lambda: SmolLM3Config(
        **{**heads(16, 4), "num_hidden_layers": 4},
        max_position_embeddings=65536,
        rope_parameters=rope(5e6),
    ),
}

CONFIGS = {**TINY, **PUBLISHED}


def model_of(config: PreTrainedConfig, attention: str | None = None) -> PreTrainedModel:
    """The same random weights at each call.

    Args:
        config: of the model.
        attention: attention implementation; the class's choice where None.
    """
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval().requires_grad_(False)
