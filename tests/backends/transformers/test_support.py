"""What a configuration says about support, and what becomes of the models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2VLTextConfig,
    Qwen3NextConfig,
    T5Config,
)

from patchkv_agents.backends.transformers.adapter import ModelAdapter
from patchkv_agents.backends.transformers.loading import pin_longrope
from patchkv_agents.backends.transformers.support import support_of
from patchkv_agents.backends.transformers.verdict import SupportLevel, judge_config
from patchkv_agents.engine import Engine
from patchkv_agents.errors import ContextTooLongError, InputError, UnsupportedModelError
from patchkv_agents.recovery import RecoveryPolicy, Window
from tests.engine.models import BUILDERS, tiny_model

from .families import FEW_HEADS, HEADS, SIZES, model_of, rope

PATCH = RecoveryPolicy("patch", Window(8, tail_tokens=4, block_size=32))
DYNAMIC = rope(1e4, rope_type="dynamic", factor=2.0)
MROPE = rope(1e4, mrope_section=[2, 3, 3])


def longrope_config(vocabulary: int = 101) -> Phi3Config:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0, *[4.0] * 7], "factor": 8.0}
    return Phi3Config(
        **{**SIZES, "vocab_size": vocabulary},
        **FEW_HEADS,
        original_max_position_embeddings=256,
        rope_parameters={**rope(1e4, rope_type="longrope"), **factors},
    )


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_supported_classes_give_their_own_frequencies(name):
    model = tiny_model(name)
    rope = support_of(model).rope
    assert rope.inv_freq.tolist() == model.model.rotary_emb.inv_freq.tolist()


REFUSED = {
    "mamba": (lambda: MambaConfig(hidden_size=48, num_hidden_layers=2), "recurrent state"),
    "qwen3_next": (lambda: Qwen3NextConfig(**SIZES, **HEADS, num_experts=4), "recurrent state"),
    "index": (lambda: LlamaConfig(**SIZES, **HEADS, index_topk=16), "(DSA)"),
    "jamba": (lambda: JambaConfig(**SIZES, num_attention_heads=4), "recurrent state"),
    "encoder-decoder": (lambda: T5Config(), "encoder-decoder"),
    "chunks": (
        lambda: Qwen2Config(**SIZES, **FEW_HEADS, layer_types=["chunked_attention"] * 4),
        "layers of type chunked_attention",
    ),
    "bidirectional": (
        lambda: LlamaConfig(**SIZES, **HEADS, is_causal=False),
        "attention is not causal",
    ),
}

EXACT = {
    "dynamic": (
        lambda: LlamaConfig(**SIZES, **HEADS, rope_parameters=DYNAMIC),
        "RoPE type 'dynamic' changes",
    ),
    "longrope": (longrope_config, "RoPE type 'longrope' changes"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_work_is_refused_with_the_reason_and_what_still_works(name):
    config, reason = REFUSED[name]
    verdict, _ = judge_config(config())
    assert verdict.level is SupportLevel.REFUSED
    assert reason in verdict.reason and "generate" in verdict.remedy


@pytest.mark.parametrize("name", sorted(EXACT))
def test_keys_that_cannot_be_moved_leave_exact_reuse(name):
    config, reason = EXACT[name]
    verdict, _ = judge_config(config())
    assert verdict.level is SupportLevel.EXACT and reason in verdict.reason
    assert "exact prefix reuse works" in verdict.remedy
    assert ("up to 256 tokens" in verdict.remedy) == (name == "longrope")


def test_a_model_is_refused_by_the_engine_without_running_it(smollm2_tokenizer):
    model = model_of(LlamaConfig(**SIZES, **HEADS, index_topk=16))
    model.register_forward_pre_hook(lambda module, args: pytest.fail("the model ran"))
    with pytest.raises(UnsupportedModelError, match=r"'llama' .*DSA.*own `generate`"):
        Engine(model, smollm2_tokenizer)


def test_a_configuration_is_refused_before_weights_are_loaded(tmp_path):
    """There are none in this folder: looking for them would be another error."""
    LlamaConfig(**SIZES, **HEADS, index_topk=16).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="DSA"):
        Engine.from_pretrained(str(tmp_path))


def test_an_unknown_architecture_is_probed():
    """Here one whose positions have three axes, which are equal for text."""
    config = Qwen2VLTextConfig(**SIZES, **FEW_HEADS, rope_parameters=MROPE)
    config.model_type = "strange"
    assert judge_config(config)[0].level is SupportLevel.PROBED
    support = support_of(model_of(Qwen2Config(**SIZES, **FEW_HEADS, rope_parameters=MROPE)))
    assert support.verdict.level is SupportLevel.APPROXIMATE


def test_sizes_that_differ_between_layers_are_no_traceback():
    """Transformers refuses to name one number of heads where layers have several."""
    config = LlamaConfig(**SIZES, **HEADS)

    class AmbiguousGlobalPerLayerAttributeError(Exception):
        """As Transformers 5.24 raises it."""

    class Several(LlamaConfig):
        @property
        def num_attention_heads(self):
            raise AmbiguousGlobalPerLayerAttributeError

        @num_attention_heads.setter
        def num_attention_heads(self, value):
            pass

    assert judge_config(Several(**config.to_dict()))[0].level is SupportLevel.APPROXIMATE


def test_yarn_extends_the_longest_context():
    """As Qwen3's documentation does for its 32,768 tokens: the factor counts."""
    yarn = rope(1e4, rope_type="yarn", factor=4.0, original_max_position_embeddings=512)
    sizes = {**SIZES, "max_position_embeddings": 640}
    assert ModelAdapter(model_of(LlamaConfig(**sizes, **HEADS))).max_tokens == 640
    config = LlamaConfig(**sizes, **HEADS, rope_parameters=yarn)
    assert ModelAdapter(model_of(config)).max_tokens == 2048
    yarn.pop("original_max_position_embeddings")
    config = LlamaConfig(**sizes, **HEADS, rope_parameters=yarn)
    assert ModelAdapter(model_of(config)).max_tokens == 2560


def test_longropes_long_factors_can_be_pinned():
    """Then frequencies do not change at 256 tokens, and keys can be moved."""
    config = longrope_config()
    pin_longrope(config)
    assert judge_config(config)[0].level is SupportLevel.APPROXIMATE
    model = model_of(config)
    long = support_of(model).rope.inv_freq
    with torch.inference_mode():
        model(torch.zeros(1, 300, dtype=torch.long))
    assert np.array_equal(support_of(model).rope.inv_freq, long)
    assert not np.array_equal(long, support_of(model_of(longrope_config())).rope.inv_freq)
    with pytest.raises(InputError, match="no longrope"):
        pin_longrope(LlamaConfig(**SIZES, **HEADS))


FILLER = " ".join(f"Item {n} costs {n * n} crowns." for n in range(12))


def messages(price: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "You sell fish."},
        {"role": "user", "content": f"A herring costs {price} crowns. {FILLER}"},
        {"role": "user", "content": "What does it cost?"},
    ]


def absolute_config(vocabulary: int) -> GPT2Config:
    return GPT2Config(vocab_size=vocabulary, n_embd=48, n_layer=2, n_head=3, n_positions=600)


@pytest.mark.parametrize("config", [longrope_config, absolute_config])
def test_a_model_whose_keys_cannot_be_moved_recovers_exactly(config, smollm2_tokenizer):
    """Whatever the policy, with the reason in the report; appended turns reuse the prefix."""
    model = model_of(config(len(smollm2_tokenizer)))
    engine = Engine(model, smollm2_tokenizer, policy=PATCH)
    thread = engine.thread("t")
    thread.generate(messages("ten"), max_new_tokens=2)
    thread.suspend()
    reply = thread.generate(messages("eleven"), max_new_tokens=2)
    assert reply.report.is_exact and reply.report.restored == 0 and reply.report.prefix > 10
    assert "cannot be moved" in reply.report.fallback_reason
    fresh = engine.thread("fresh").generate(messages("eleven"), max_new_tokens=2)
    torch.testing.assert_close(reply.first_logits, fresh.first_logits, atol=1e-3, rtol=0)
    thread.suspend()
    longer = [*messages("eleven"), {"role": "user", "content": "And two?"}]
    report = thread.generate(longer, max_new_tokens=2).report
    assert report.is_exact and report.prefix >= fresh.report.tokens - 5


def test_what_would_change_the_frequencies_is_too_long(smollm2_tokenizer):
    """LongRoPE is one thing up to its original length and another behind it."""
    engine = Engine(model_of(longrope_config(len(smollm2_tokenizer))), smollm2_tokenizer)
    assert engine.max_tokens == 256
    with pytest.raises(ContextTooLongError, match="is 256 tokens"):
        engine.thread("t").generate([{"role": "user", "content": "word " * 300}])


def test_a_rope_that_moves_nothing_never_gives_a_wrong_number():
    """Rows in place keep their bits; a row that was moved by mistake is NaN."""
    from patchkv_agents.backends.transformers.support import immovable
    from patchkv_kernels import PayloadFormat, dequantize_scatter, quantize_gather

    keys = torch.randn(2, 1, 8, 16, generator=torch.Generator().manual_seed(0))
    rope, rows = immovable(), np.arange(8)
    payload = quantize_gather(keys, keys, [(0, 8, 0)], format=PayloadFormat.NATIVE, rope=rope)
    moved, values = torch.zeros_like(keys), torch.zeros_like(keys)
    wanted = np.where(rows < 4, rows, rows + 1)
    dequantize_scatter(payload, rows, rows, wanted, moved, values, rope=rope)
    assert torch.equal(moved[:, :, :4], keys[:, :, :4]) and torch.equal(values, keys)
    assert moved[:, :, 4:, [0, 1]].isnan().all()
