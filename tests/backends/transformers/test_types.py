"""Model types of Transformers as tiny random models: what is said of them holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patchkv_agents.backends.transformers.adapter import ModelAdapter, plain_call
from patchkv_agents.backends.transformers.support import support_of
from patchkv_agents.backends.transformers.verdict import SupportLevel, judge_config
from patchkv_agents.checkpoint.stores import MemoryStore
from patchkv_agents.engine import Engine
from patchkv_agents.engine.sequence import KVSequence
from patchkv_agents.errors import UnsupportedModelError
from patchkv_agents.recovery import Blocks, DirectReuse, RecoveryPolicy, Window
from tests.engine.models import edited

from .types import APPROXIMATE, EXPERTS, HYBRID, VOCABULARY, config_of, exists, model_of

WHOLE = RecoveryPolicy("whole", Window(10**6, tail_tokens=64, block_size=32))
RESTORE = RecoveryPolicy("restore", DirectReuse())
QUICK = (
    *("gpt_oss", "gemma4_text", "gemma4_text/E4B", "gemma4_text/26B-A4B", "glm4_moe_lite"),
    *("mistral3", "deepseek_v3", "laguna", "granitemoehybrid/dense", "qwen3_vl", "mimo_v2_flash"),
)
NAMES = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(not exists(name), reason="this Transformers does not have it"),
            *([] if name in QUICK else [pytest.mark.slow]),
        ],
    )
    for name in APPROXIMATE
]


def random_ids(seed, count):
    return np.random.default_rng(seed).integers(3, VOCABULARY - 20, count)


def eager_model(name):
    """The reference: its own attention, where it has one besides kernels."""
    try:
        return model_of(config_of(name), "eager")
    except ValueError:
        return model_of(config_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_recovery_with_the_whole_suffix_repaired_is_a_full_prefill(name):
    """Through a fork, storing in between and some decoded tokens too."""
    model = model_of(config_of(name))
    support = support_of(model)
    assert support.verdict.level is SupportLevel.APPROXIMATE
    old = random_ids(1, 150)
    new = edited(old, [(40, 10, 17), (100, 5, 0)])
    first = KVSequence(ModelAdapter(model), support.rope)
    first.resume(old, RecoveryPolicy.exact())
    sequence = first.fork()
    resumed = sequence.resume(new, WHOLE, room=8)
    assert resumed.plan.is_exact and resumed.restored_formats == {"native": 40}
    logits = [resumed.logits]
    for _ in range(4):
        logits.append(sequence.append(int(logits[-1].argmax())))
    with torch.inference_mode():
        ids = torch.tensor(sequence.token_ids)[None]
        expected = eager_model(name)(ids, use_cache=False).logits[0, len(new) - 1 :]
    scale = float(expected.std())
    torch.testing.assert_close(torch.stack(logits), expected, atol=1e-3 * scale, rtol=0)
    sequence.suspend()
    longer = np.concatenate([sequence.token_ids, random_ids(3, 5)])
    resumed = sequence.resume(longer, RecoveryPolicy.exact())
    assert int(resumed.plan.kept.sum()) >= len(new)
    with torch.inference_mode():
        expected = eager_model(name)(torch.tensor(longer)[None], use_cache=False).logits[0, -1]
    torch.testing.assert_close(resumed.logits, expected, atol=1e-3 * scale, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_moved_rows_are_those_of_the_new_positions(name):
    """Restored as they are behind tokens put in front: keys as the model makes them there."""
    model = model_of(config_of(name))
    support = support_of(model)
    old, front = random_ids(1, 90), random_ids(2, 33)
    sequence = KVSequence(ModelAdapter(model), support.rope)
    sequence.resume(old, RecoveryPolicy.exact())
    sequence.suspend()
    sequence.resume(np.concatenate([front, old]), RESTORE)
    cache = sequence.live_cache
    _, still = plain_call(model, old)
    _, moved = plain_call(model, old, shift=len(front))
    rows = slice(len(front), len(front) + 60)
    for layer, (keys, values) in enumerate(moved):
        own_keys, own_values = cache.layer(layer)
        scale = float(keys.square().mean().sqrt())
        torch.testing.assert_close(own_keys[:, rows], keys[:, :60], atol=1e-3 * scale, rtol=0)
        torch.testing.assert_close(own_values[:, rows], still[layer][1][:, :60])
        assert torch.isfinite(values).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXPERTS if exists(name)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_does_not_change_the_verdict_on_experts(name, dtype):
    """Experts flip in 16 bits: ten of fifteen types were refused or not at random."""
    for seed in range(6):
        model = model_of(config_of(name))
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.05)
        assert support_of(model.to(dtype)).verdict.level is SupportLevel.APPROXIMATE


@pytest.mark.parametrize("name", [name for name in HYBRID if exists(name)])
def test_recurrent_state_is_refused_before_weights_are_read(name):
    config = config_of(name)
    verdict, _ = judge_config(config)
    assert verdict.level is SupportLevel.REFUSED and "recurrent state" in verdict.reason


@pytest.mark.parametrize("name", ["gemma4_text/26B-A4B", "glm4_moe_lite", "mistral3"])
def test_threads_of_layers_that_differ_are_stored_and_loaded(name, smollm2_tokenizer, tmp_path):
    """By name, with a store: what one engine suspends, another resumes; answers stream."""
    if not exists(name):
        pytest.skip("this Transformers does not have it")
    config = config_of(name)
    config.get_text_config(decoder=True).vocab_size = len(smollm2_tokenizer)
    if hasattr(config.get_text_config(decoder=True), "vocab_size_per_layer_input"):
        config.get_text_config(decoder=True).vocab_size_per_layer_input = len(smollm2_tokenizer)
    model_of(config).save_pretrained(tmp_path)
    smollm2_tokenizer.save_pretrained(tmp_path)
    store = MemoryStore()
    messages = [{"role": "user", "content": f"Item {n} costs {n} crowns."} for n in range(12)]
    edit = [{"role": "user", "content": "Item zero is free."}, *messages[1:]]
    policy = RecoveryPolicy("patch", Window(8, tail_tokens=8, rule=Blocks(0.1)))
    options = {"policy": policy, "device": "cpu", "dtype": "float32", "store": store}
    first = Engine.from_pretrained(str(tmp_path), **options)
    thread = first.thread("t")
    thread.generate(messages, max_new_tokens=2)
    thread.suspend()
    first.flush()
    second = Engine.from_pretrained(str(tmp_path), **options)
    *_, last = second.thread("t").stream(edit, max_new_tokens=3)
    report = last.reply.report
    assert report.restored > 0.5 * report.tokens and not report.is_exact


def test_a_refused_type_says_what_works(tmp_path):
    from patchkv_agents.backends.transformers.support import check_config

    name = next(name for name in HYBRID if exists(name))
    with pytest.raises(UnsupportedModelError, match="own `generate`") as error:
        check_config(config_of(name))
    assert "\n" not in str(error.value) and error.value.exit_status == 2
