"""Tiny configurations of model types that Transformers has, by the classes of its registry.

Sizes are small and of every kind at once; each type takes those that its configuration knows, and
a few numbers of its own where these do not fit.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCABULARY = 300
LAYERS = 4

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,  # logits of standard deviation 1: a wrong key shows
    "sliding_window": 20,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "shared_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
_GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 16, "global_head_dim": 32}
_GEMMA4 = {**_GEMMA, "num_hidden_layers": 6, "hidden_size_per_layer_input": 8}
_PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
_SHARED = ["sliding_attention", "sliding_attention", "full_attention"] * 4
_IDS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
_PICTURES: dict[str, Any] = {
    "hidden_size": 32,
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
    "intermediate_size": 32,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}

APPROXIMATE: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "apertus": {},
    "arcee": {},
    "axk1": _LATENT,
    "cohere2": {"sliding_window_pattern": 2},
    "cwm": _IDS,
    "deepseek_v2": {**_LATENT, "topk_method": "greedy", "aux_loss_alpha": 0.0},
    "deepseek_v3": _LATENT,
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {"sliding_window_pattern": 2},
    "flint": {},
    "gemma3n_text": {
        **_PER_LAYER,
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 10,
    },
    "gemma4_text": {**_GEMMA4, "num_kv_shared_layers": 0},
    "gemma4_text/E4B": {
        **_GEMMA4,
        **_PER_LAYER,
        "num_hidden_layers": 12,
        "num_kv_shared_layers": 6,
        "layer_types": _SHARED,
    },
    "gemma4_text/26B-A4B": {
        **_GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
    },
    "glm4_moe_lite": _LATENT,
    "gpt_oss": {},
    "granite_swa": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid/dense": {"layer_types": ["full_attention"] * LAYERS},
    "hunyuan_v1_dense": {},
    "hy_v3": {},
    "laguna": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "longcat_flash": {
        **_LATENT,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "num_layers": 2,
        "moe_topk": 2,
    },
    "mellum": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "mimo_v2_flash": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "v_head_dim": 16,
    },
    "minicpm3": _LATENT,
    "minimax_m2": {"rotary_dim": 8},
    "ministral": {},
    "ministral3": {},
    "mistral3": {},
    "mixtral": {},
    "nemotron": {},
    "olmo3": {},
    "olmoe": {},
    "qwen2_5_vl": {"rope_parameters": _SECTIONS},
    "qwen2_moe": {},
    "qwen3_vl": {"rope_parameters": _SECTIONS},
    "seed_oss": {},
    "solar_open": {},
    "youtu": _LATENT,
}
"""Types of which edited contexts are recovered, with the numbers that they need."""

EXPERTS = ("gpt_oss", "mixtral", "minimax_m2", "dots1", "afmoe", "hy_v3", "granitemoe", "olmoe")
"""Some of those with experts."""

HYBRID: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "falcon_h1": {},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "kimi_linear": {**_LATENT, "layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    },
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "qwen3_next": {},
}
"""Types with recurrent state."""

_RECURRENT: dict[str, Any] = {
    **dict.fromkeys(("linear_num_key_heads", "n_groups", "mamba_n_groups"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    "mamba_d_ssm": 128,
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
}


def exists(name: str) -> bool:
    """Whether the installed Transformers knows a type."""
    return name.partition("/")[0] in CONFIG_MAPPING


def config_of(name: str) -> PreTrainedConfig:
    """A tiny configuration of a type: its name, or its name and a variant behind a slash."""
    cls = CONFIG_MAPPING[name.partition("/")[0]]
    own = {**APPROXIMATE, **HYBRID}[name]
    default = cls()
    text = default.get_text_config(decoder=True)
    known = _known(text, {**_COMMON, **_EXPERTS, **_RECURRENT})
    if name.startswith("gemma4_text") and "num_experts" not in own:
        known = {key: value for key, value in known.items() if "expert" not in key}
    if text is default:
        return cls(**{**known, **own})
    vision = default.vision_config
    pictures = {**_known(vision, _PICTURES), "model_type": vision.model_type}
    return cls(text_config={**known, **own, "model_type": text.model_type}, vision_config=pictures)


def _known(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if _has(config, key)}


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # sizes that differ between layers
        return True


def model_of(config: PreTrainedConfig, attention: str | None = None) -> PreTrainedModel:
    """The same random weights at each call, none of them zero."""
    torch.manual_seed(0)
    wrapped = config.get_text_config(decoder=True) is not config
    auto: Any = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.numel() and bool((weight == 0).all()):
                weight.normal_(0, 0.1)
            if "sink" in name:
                weight.normal_()
    return model.eval().requires_grad_(False).float()
