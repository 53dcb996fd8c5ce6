"""What can be said of a model's support from its configuration alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from patchkv_agents.backends.transformers.families import FAMILIES, RECURRENT, SPARSE, Family

STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""RoPE types whose frequencies do not depend on the length of the context."""

_ROWS_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Types of layers whose state is one key and one value per token."""


_OTHER_STATE = {
    "inkling_text": RECURRENT,
    "jamba": RECURRENT,
    "lfm2": RECURRENT,
    "lfm2_moe": RECURRENT,
    "minimax": RECURRENT,
    "zaya": RECURRENT,
}
"""Reasons for text models whose configurations do not show them."""


class SupportLevel(str, Enum):
    """What an engine can do with a model, from most to least."""

    APPROXIMATE = "approximate"
    """All recovery policies."""
    PROBED = "probed"
    """An architecture that is not in the table: a probe at load decides."""
    EXACT = "exact"
    """Exact prefix reuse only: keys cannot be moved to other positions."""
    REFUSED = "refused"
    """Nothing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a model is supported.

    Attributes:
        level: what works.
        reason: why not everything does; empty for `APPROXIMATE`.
        max_tokens: longest context for which this holds, where that is less than the model's own.
    """

    level: SupportLevel
    reason: str = ""
    max_tokens: int | None = None

    @property
    def remedy(self) -> str:
        """What still works, and what to do; empty for `APPROXIMATE`."""
        if self.level is SupportLevel.PROBED:
            return "loading it runs a probe of a few seconds, which decides"
        if self.level is SupportLevel.EXACT:
            limit = f", up to {self.max_tokens} tokens" if self.max_tokens else ""
            return f"exact prefix reuse works{limit}; edits in the middle are prefilled again"
        if self.level is SupportLevel.REFUSED:
            return (
                "it still runs with Transformers' own `generate`; `patchkv models` lists the "
                "families that are recovered"
            )
        return ""


def judge_config(config: Any) -> tuple[Verdict, Family | None]:
    """The verdict on a Transformers configuration, and the family it belongs to, if any."""
    text = config.get_text_config(decoder=True)
    family = FAMILIES.get(config.model_type)
    reason = next(_refusals(config, text), None)
    if reason is not None:
        return Verdict(SupportLevel.REFUSED, reason), family
    for reason, max_tokens in _immovable(text):
        return Verdict(SupportLevel.EXACT, reason, max_tokens), family
    if family is None:
        reason = f"model type '{config.model_type}' is not among the verified families"
        return Verdict(SupportLevel.PROBED, reason), None
    return Verdict(SupportLevel.APPROXIMATE), family


def layer_types(text: Any) -> list[str]:
    """The type of each layer of a text configuration, as Transformers calls them."""
    types: list[str] | None = getattr(text, "layer_types", None)
    if types is not None:
        return list(types)
    windowed = getattr(text, "sliding_window", None) is not None
    return ["sliding_attention" if windowed else "full_attention"] * text.num_hidden_layers


def rope_parameters(text: Any) -> list[dict[str, Any]]:
    """The distinct RoPE parameters of a text configuration: one set, or one per layer type."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or ([parameters] if parameters else [])


def _refusals(config: Any, text: Any) -> Iterator[str]:
    """Reasons for which nothing works."""
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder: its decoder's state depends on the encoder's input"
    if _attribute(text, "num_attention_heads") is None or _has_recurrence(text):
        yield RECURRENT
    if _attribute(text, "index_topk") is not None or _attribute(text, "index_n_heads") is not None:
        yield SPARSE
    if text.model_type in _OTHER_STATE:
        yield _OTHER_STATE[text.model_type]
    others = set(layer_types(text)) - _ROWS_TYPES
    if others:
        yield f"it has layers of type {', '.join(sorted(others))}"
    bidirectional = getattr(text, "use_bidirectional_attention", False)  # "vision": pictures only
    if getattr(text, "is_causal", True) is False or bidirectional in (True, "all"):
        yield "its attention is not causal"
    if getattr(text, "alibi", False):
        yield "its attention adds position biases (ALiBi)"


def _has_recurrence(text: Any) -> bool:
    names = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"}
    blocks = getattr(text, "layers_block_type", None) or getattr(text, "block_types", None) or ()
    return bool(names & {*layer_types(text), *blocks})


def _immovable(text: Any) -> Iterator[tuple[str, int | None]]:
    """Reasons for which keys cannot be moved, each with the longest context that is exact."""
    for parameters in rope_parameters(text):
        rope_type = parameters.get("rope_type", "default")
        if rope_type == "longrope" and is_pinned(parameters):
            continue
        if rope_type == "longrope":
            limit = parameters.get("original_max_position_embeddings")
            limit = limit or getattr(text, "original_max_position_embeddings", None)
            yield _changing(rope_type), limit
        elif rope_type not in STATIC_ROPE_TYPES:
            yield _changing(rope_type), None


def is_pinned(parameters: dict[str, Any]) -> bool:
    """Whether longrope's factors are the same at every length."""
    short = parameters.get("short_factor")
    return short is not None and short == parameters.get("long_factor")


def _attribute(text: Any, name: str) -> Any:
    """An attribute of a configuration; True where it differs between layers."""
    try:
        return getattr(text, name, None)
    except Exception as error:  # Transformers has an error of its own, not in all releases
        if "PerLayer" in type(error).__name__:
            return True
        raise


def _changing(rope_type: str) -> str:
    return f"its RoPE type '{rope_type}' changes frequencies with the context's length"
