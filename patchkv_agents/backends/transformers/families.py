"""The families of models that have been verified, each with what its attention does differently.

What the table says was read in Transformers' modelling code, and the tests hold it against that
code for a model of each family. An architecture that is not here is probed when it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from patchkv_kernels import RopeLayout


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        model_type: as configurations call it.
        examples: models of the family.
        layout: how its RoPE pairs channels.
        notes: what is special about it, for the list of models.
    """

    model_type: str
    examples: str
    layout: RopeLayout = RopeLayout.HALF_SPLIT
    notes: str = ""


_FAMILIES = (
    Family("gemma2", "Gemma 2", notes="sliding-window layers, capped scores"),
    Family("gemma3", "Gemma 3 (text only)", notes="sliding-window layers, RoPE by layer type"),
    Family("gemma3_text", "Gemma 3", notes="sliding-window layers, RoPE by layer type"),
    Family("glm", "GLM-4 (2024)", RopeLayout.INTERLEAVED, "partial RoPE, interleaved"),
    Family("glm4", "GLM-4-0414", RopeLayout.INTERLEAVED, "partial RoPE, interleaved"),
    Family("glm4_moe", "GLM-4.5", notes="partial RoPE, half-split; experts"),
    Family("gpt_oss", "gpt-oss", notes="attention sinks; sliding-window layers; experts"),
    Family("granite", "Granite 3", notes="scaled scores and residuals"),
    Family("llama", "Llama 2 and 3, SmolLM2", notes="Llama 3 RoPE scaling"),
    Family("mistral", "Mistral, Mistral Small", notes="sliding window where configured"),
    Family("olmo2", "OLMo 2", notes="normalised queries and keys"),
    Family("phi3", "Phi-3, Phi-4", notes="partial RoPE where configured"),
    Family("qwen2", "Qwen2, Qwen2.5", notes="key biases"),
    Family("qwen3", "Qwen3", notes="normalised queries and keys"),
    Family("qwen3_moe", "Qwen3-MoE", notes="normalised queries and keys; experts"),
    Family("smollm3", "SmolLM3", notes="layers without RoPE"),
)

FAMILIES = {family.model_type: family for family in _FAMILIES}
"""The verified families by `config.model_type`."""
