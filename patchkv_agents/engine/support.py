"""Which models the engine can hold correctly, and the refusal of the rest with a reason."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from patchkv_agents.errors import UnsupportedModelError
from patchkv_agents.recovery.rope import Rope
from patchkv_kernels import RopeLayout

LAYOUTS: dict[str, RopeLayout] = {
    "llama": RopeLayout.HALF_SPLIT,
    "mistral": RopeLayout.HALF_SPLIT,
    "qwen2": RopeLayout.HALF_SPLIT,
    "qwen3": RopeLayout.HALF_SPLIT,
}
"""RoPE layout by `config.model_type` of the supported architectures."""

STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""RoPE types whose frequencies do not depend on the length of the context."""


def _refuse(model_type: str, reason: str) -> UnsupportedModelError:
    known = ", ".join(sorted(LAYOUTS))
    return UnsupportedModelError(
        f"model type '{model_type}' cannot be used: {reason}. "
        f"Supported are models of type {known} with full attention in every layer"
    )


def rope_of(model: PreTrainedModel) -> Rope:
    """The rotary embedding of a supported model.

    Raises:
        UnsupportedModelError: the architecture is not known, keeps state that is not one key and
            one value per token and layer, or has frequencies that change with the length.
    """
    config: Any = model.config
    model_type: str = config.model_type
    if model_type not in LAYOUTS:
        raise _refuse(model_type, "its cache and RoPE layout have not been verified")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    if layer_types != {"full_attention"} or (model_type == "mistral" and windowed):
        raise _refuse(model_type, "it has sliding-window layers, which forget rows")
    rotary: Any = getattr(model.base_model, "rotary_emb", None)
    rope_type = getattr(rotary, "rope_type", None)
    if rope_type not in STATIC_ROPE_TYPES:
        raise _refuse(model_type, f"its RoPE type '{rope_type}' changes with the context's length")
    inv_freq: torch.Tensor = rotary.inv_freq
    return Rope(inv_freq.detach().float().cpu().numpy(), LAYOUTS[model_type])
