"""Model types by what can be done with them, and the models that people know them by.

What the table says of RoPE was read in Transformers' modelling code, and the tests hold it against
that code for a model of each type. Where it says nothing, and for types that are not here, a probe
finds it when the model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from patchkv_kernels import RopeLayout


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture whose edited contexts are recovered.

    Attributes:
        model_type: as configurations call it.
        examples: models of the family.
        layout: how its RoPE pairs channels; None: a probe finds it.
        notes: what is special about it, for the list of models.
    """

    model_type: str
    examples: str
    layout: RopeLayout | None = RopeLayout.HALF_SPLIT
    notes: str = ""


@dataclass(frozen=True, slots=True)
class RefusedFamily:
    """One architecture that is refused, and why."""

    model_type: str
    examples: str
    reason: str


RECURRENT = "it has layers with recurrent state, which cannot be patched token by token"
SPARSE = "its sparse attention chooses keys by an index of its own (DSA)"

_FAMILIES = (
    Family("gemma2", "Gemma 2", notes="sliding-window layers, capped scores"),
    Family("gemma3", "Gemma 3 (text only)", notes="sliding-window layers, RoPE by layer type"),
    Family("gemma3_text", "Gemma 3", notes="sliding-window layers, RoPE by layer type"),
    Family("glm", "GLM-4 (2024)", RopeLayout.INTERLEAVED, "partial RoPE, interleaved"),
    Family("glm4", "GLM-4-0414", RopeLayout.INTERLEAVED, "partial RoPE, interleaved"),
    Family("glm4_moe", "GLM-4.5 to 4.7", notes="partial RoPE, half-split; experts"),
    Family("gpt_oss", "gpt-oss", notes="attention sinks; sliding-window layers; experts"),
    Family("granite", "Granite 3", notes="scaled scores and residuals"),
    Family("llama", "Llama 2 and 3, SmolLM2", notes="Llama 3 RoPE scaling"),
    Family("mistral", "Mistral, Mistral Small", notes="sliding window where configured"),
    Family("olmo2", "OLMo 2", notes="normalised queries and keys"),
    Family("phi3", "Phi-3, Phi-4", notes="partial RoPE where configured"),
    Family("qwen2", "Qwen2, Qwen2.5", notes="key biases"),
    Family("qwen3", "Qwen3 (0.6B to 32B)", notes="normalised queries and keys"),
    Family("qwen3_moe", "Qwen3-30B-A3B, Qwen3-Coder", notes="normalised queries and keys; experts"),
    Family("smollm3", "SmolLM3", notes="layers without RoPE"),
    *(
        Family(model_type, examples, None, notes)
        for model_type, examples, notes in (
            ("afmoe", "Trinity", "layers without RoPE; experts"),
            ("apertus", "Apertus", ""),
            ("arcee", "AFM-4.5B", ""),
            ("cohere2", "Command R7B, Command A", "sliding-window layers, layers without RoPE"),
            ("cwm", "Code World Model", "sliding-window layers"),
            ("deepseek_v2", "DeepSeek-V2, DeepSeek-Coder-V2", "latent attention (MLA); experts"),
            ("deepseek_v3", "DeepSeek-V3, R1, V3.1", "latent attention (MLA); experts"),
            ("dots1", "dots.llm1", "experts"),
            ("ernie4_5", "ERNIE 4.5", ""),
            ("ernie4_5_moe", "ERNIE 4.5 A3B", "experts"),
            ("exaone4", "EXAONE 4.0", "sliding-window layers, layers without RoPE"),
            ("gemma3n_text", "Gemma 3n", "layers that share keys and values"),
            ("gemma4_text", "Gemma 4 (E2B, E4B, 26B-A4B, 31B)", "head sizes and RoPE by layer"),
            ("glm4_moe_lite", "GLM-4.7-Flash", "latent attention (MLA); experts"),
            ("granite_swa", "Granite with windows", "attention sinks; sliding-window layers"),
            ("granitemoe", "Granite 3 MoE", "experts"),
            ("hunyuan_v1_dense", "Hunyuan dense", ""),
            ("hy_v3", "Hunyuan 3", "experts"),
            ("laguna", "Laguna", "RoPE widths by layer; experts"),
            ("longcat_flash", "LongCat-Flash", "latent attention (MLA); experts"),
            ("mellum", "Mellum", "sliding-window layers"),
            ("mimo_v2_flash", "MiMo-V2-Flash", "attention sinks; head sizes by layer; experts"),
            ("minicpm3", "MiniCPM3", "latent attention (MLA)"),
            ("minimax_m2", "MiniMax-M2", "experts"),
            ("ministral", "Ministral 8B", "sliding-window layers"),
            ("ministral3", "Ministral 3 (text)", ""),
            ("mistral3", "Mistral Small 3.1, Devstral Small 2, Ministral 3", "text alone"),
            ("mixtral", "Mixtral", "experts"),
            ("nemotron", "Nemotron-4, Minitron", ""),
            ("olmo3", "OLMo 3", "sliding-window layers"),
            ("olmoe", "OLMoE", "experts"),
            ("qwen2_5_vl", "Qwen2.5-VL", "text alone"),
            ("qwen2_moe", "Qwen1.5-MoE, Qwen2-57B-A14B", "experts"),
            ("qwen3_vl", "Qwen3-VL", "text alone"),
            ("seed_oss", "Seed-OSS", ""),
            ("solar_open", "Solar Open", "experts"),
        )
    ),
)

FAMILIES = {family.model_type: family for family in _FAMILIES}
"""The verified families by `config.model_type`."""

REFUSED_FAMILIES = (
    RefusedFamily("qwen3_5, qwen3_5_moe", "Qwen3.5, Qwen3.6, Qwen3.8", RECURRENT),
    RefusedFamily("qwen3_next", "Qwen3-Next, Qwen3-Coder-Next", RECURRENT),
    RefusedFamily("nemotron_h", "Nemotron 3 Nano, Nemotron-H", RECURRENT),
    RefusedFamily("granitemoehybrid", "Granite 4 H", RECURRENT),
    RefusedFamily("lfm2, lfm2_moe", "LFM2, LFM2.5", RECURRENT),
    RefusedFamily("kimi_linear", "Kimi Linear", RECURRENT),
    RefusedFamily("falcon_h1, bamba, jamba, zaya", "Falcon-H1, Bamba, Jamba, Zaya", RECURRENT),
    RefusedFamily("minimax", "MiniMax-01, MiniMax-M1", RECURRENT),
    RefusedFamily("deepseek_v32, glm_moe_dsa", "DeepSeek-V3.2, GLM-5", SPARSE),
    RefusedFamily("llama4", "Llama 4", "it has layers of type chunked_attention"),
    RefusedFamily("deepseek_v4", "DeepSeek-V4", SPARSE),
)
"""Refused families of models that people know."""
