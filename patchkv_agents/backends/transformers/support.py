"""Which models an engine can hold correctly, how far, and the refusal of the rest with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from patchkv_agents.backends.transformers.probe import probe
from patchkv_agents.backends.transformers.verdict import (
    SupportLevel,
    Verdict,
    judge_config,
    layer_types,
)
from patchkv_agents.errors import UnsupportedModelError
from patchkv_kernels import Rope, RopeLayout


@dataclass(frozen=True, slots=True)
class Support:
    """How far a loaded model is supported.

    Attributes:
        verdict: `APPROXIMATE` or `EXACT`, and why.
        rope: moves keys to other positions. With `EXACT` they cannot be moved, and whatever is
            rotated with it becomes NaN.
    """

    verdict: Verdict
    rope: Rope


def check_config(config: Any) -> None:
    """Refuse a model before its weights are loaded, where its configuration says enough.

    Raises:
        UnsupportedModelError: see `support_of`.
    """
    verdict, _ = judge_config(config)
    if verdict.level is SupportLevel.REFUSED:
        raise _refusal(config, verdict)


def support_of(model: PreTrainedModel) -> Support:
    """How far a model is supported. Unknown architectures are run on a few random tokens.

    Raises:
        UnsupportedModelError: nothing works; the message says why, and what does.
    """
    config: Any = model.config
    check_config(config)
    verdict, family = judge_config(config)
    if family is not None and family.layout is not None:
        if verdict.level is SupportLevel.EXACT:
            return Support(verdict, immovable())
        return Support(verdict, _family_rope(model, family.layout))
    found, rope = probe(model)
    if found.level is SupportLevel.REFUSED:
        raise _refusal(config, found)
    if verdict.level is SupportLevel.EXACT:
        return Support(verdict, immovable())
    return Support(found, rope or immovable())


def rope_of(model: PreTrainedModel) -> Rope:
    """What moves a model's keys; see `support_of`."""
    return support_of(model).rope


def immovable() -> Rope:
    """The rope of a model whose keys keep their positions: a rotation by it gives NaN."""
    return Rope(np.array([np.nan], dtype=np.float32), RopeLayout.HALF_SPLIT)


def _family_rope(model: PreTrainedModel, layout: RopeLayout) -> Rope:
    """The frequencies that the model's own modules hold, by layer where layers differ."""
    decoder: Any = model.get_decoder()
    types = layer_types(model.config.get_text_config(decoder=True))
    rows = []
    for layer, kind in zip(decoder.layers, types, strict=True):
        frequencies = _frequencies(decoder.rotary_emb, kind)
        # SmolLM3: some layers do not rotate.
        rotates = getattr(layer.self_attn, "use_rope", True)
        rows.append(frequencies if rotates else np.zeros_like(frequencies))
    by_layer = np.stack(rows)
    same = bool((by_layer == by_layer[0]).all())
    return Rope(by_layer[0] if same else by_layer, layout)


def _frequencies(rotary: Any, layer_type: str) -> npt.NDArray[np.float32]:
    buffer = getattr(rotary, f"{layer_type}_inv_freq", None)
    if buffer is None:
        buffer = rotary.inv_freq
    frequencies: npt.NDArray[np.float32] = buffer.detach().float().cpu().numpy()
    return frequencies


def _refusal(config: Any, verdict: Verdict) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model type '{config.model_type}' cannot be used: {verdict.reason}. {verdict.remedy}"
    )
