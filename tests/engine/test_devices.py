"""Models whose layers lie in several places, are offloaded, or are quantised.

A machine without GPUs has one device that computes. Layers on disk are tested as they are;
several devices by taking a cache apart into shards that are all on the CPU.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import pytest
import torch

from patchkv_agents.backends.transformers.adapter import LayerPlacement, ModelAdapter
from patchkv_agents.backends.transformers.fingerprint import model_fingerprint
from patchkv_agents.backends.transformers.loading import load_model
from patchkv_agents.backends.transformers.probe import probe
from patchkv_agents.backends.transformers.support import rope_of
from patchkv_agents.backends.transformers.verdict import SupportLevel
from patchkv_agents.checkpoint.offload import store_rows
from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.checkpoint.shards import CacheShard, gather
from patchkv_agents.engine import Engine
from patchkv_agents.engine.sequence import KVSequence
from patchkv_agents.ranges import RowSet
from patchkv_agents.recovery import Blocks, RecoveryPolicy, Window
from patchkv_agents.recovery.restore import Restoration
from patchkv_kernels import PayloadFormat, Rope, RopeLayout, quantize_gather

from .models import edited, full_logits, random_ids, sequence_of, tiny_engine, tiny_model

PATCH = RecoveryPolicy("patch", Window(16, tail_tokens=8, block_size=32, rule=Blocks(0.1)))
WHOLE = RecoveryPolicy("whole", Window(10**6, tail_tokens=8, block_size=32))

OLD = random_ids(1, 300)
NEW = edited(OLD, [(40, 9, 13)])


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def folder(model, smollm2_tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    smollm2_tokenizer.save_pretrained(path)
    return path


def offloaded(folder, tmp_path, device_map):
    return load_model(str(folder), device_map=device_map, offload_folder=tmp_path)[0]


DISK = {"": "disk"}
PARTLY = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.layers.2": "disk",
    "model.norm": "cpu",
    "lm_head": "cpu",
}


@pytest.mark.parametrize("device_map", [DISK, PARTLY], ids=["disk", "partly"])
def test_recovery_with_weights_on_disk(model, folder, tmp_path, device_map):
    """Bit for bit what the whole model does: recovered, decoded on, and with everything anew."""
    away = offloaded(folder, tmp_path, device_map)
    assert any(weight.is_meta for weight in away.parameters())
    torch.testing.assert_close(full_logits(away, NEW), full_logits(model, NEW))
    outcomes = []
    for each in (model, away):
        sequence = sequence_of(each, storage=PrecisionPolicy())
        sequence.resume(OLD, PATCH)
        sequence.suspend()
        logits = sequence.resume(NEW, PATCH).logits
        outcomes.append(torch.stack([logits, sequence.append(7), sequence.append(8)]))
        assert sequence.versions.payload_bytes > 0
    assert torch.equal(*outcomes)
    sequence = sequence_of(away)
    sequence.resume(OLD, WHOLE)
    sequence.suspend()
    recovered = sequence.resume(NEW, WHOLE)
    torch.testing.assert_close(recovered.logits, full_logits(model, NEW), atol=1e-3, rtol=0)


def test_offloaded_weights_are_the_same_model_in_stores(model, folder, tmp_path, smollm2_tokenizer):
    plain = model_fingerprint(model, smollm2_tokenizer)
    away = offloaded(folder, tmp_path, PARTLY)
    assert model_fingerprint(away, smollm2_tokenizer) == plain
    with torch.no_grad():
        changed = tiny_model("qwen3")
        changed.model.layers[2].mlp.up_proj.weight[0, 0] += 1
    changed.save_pretrained(tmp_path / "changed")
    smollm2_tokenizer.save_pretrained(tmp_path / "changed")
    other = offloaded(tmp_path / "changed", tmp_path / "away", DISK)
    assert model_fingerprint(other, smollm2_tokenizer) != plain


def test_an_engine_on_disk_answers_like_another(smollm2_tokenizer, tmp_path):
    """From messages to text."""
    tiny_engine(smollm2_tokenizer, 700).adapter.model.save_pretrained(tmp_path / "model")
    smollm2_tokenizer.save_pretrained(tmp_path / "model")
    name, folder = str(tmp_path / "model"), tmp_path / "weights"
    engines = [
        Engine.from_pretrained(name, device="cpu"),
        Engine.from_pretrained(name, device_map={"": "disk"}, offload_folder=folder),
    ]
    messages = [
        {"role": "user", "content": "The ferry leaves from pier 4. " * 20},
        {"role": "user", "content": "Which pier?"},
    ]
    changed = [{"role": "user", "content": "The boat leaves from pier 9. " * 20}, messages[1]]
    replies = []
    for engine in engines:
        thread = engine.thread("a")
        thread.generate(messages, max_new_tokens=3)
        thread.suspend()
        replies.append(thread.generate(changed, policy=PATCH, max_new_tokens=8))
    assert replies[0].token_ids == replies[1].token_ids
    assert engines[0].fingerprint == engines[1].fingerprint


def test_an_unknown_architecture_is_probed_on_disk(folder, tmp_path):
    verdict, rope = probe(offloaded(folder, tmp_path, DISK))
    assert verdict.level is SupportLevel.APPROXIMATE, verdict.reason
    assert np.array_equal(rope.inv_freq, rope_of(tiny_model("qwen3")).inv_freq)


# --- quantised weights ---


class Int8Linear(torch.nn.Module):
    """Weights of 8 bits with a scale per row, as a quantised checkpoint has them."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(dim=1) / 127
        self.register_buffer("weight", (linear.weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows.float() @ self.weight.float().T * self.scale).to(rows.dtype)


def quantised(name="qwen3"):
    model = tiny_model(name)
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for part, linear in list(module.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    setattr(module, part, Int8Linear(linear))
    return model


def check_quantised(model, tokenizer, tolerance):
    """Recovery of everything is a full prefill by the same weights; stores tell it by them."""
    sequence = sequence_of(model)
    sequence.resume(OLD, WHOLE)
    sequence.suspend()
    recovered = sequence.resume(NEW, WHOLE)
    torch.testing.assert_close(recovered.logits, full_logits(model, NEW), atol=tolerance, rtol=0)
    plain = tiny_model("qwen3")
    assert not torch.allclose(recovered.logits.float(), full_logits(plain, NEW), atol=1e-3)
    fingerprint = model_fingerprint(model, tokenizer)
    assert fingerprint == model_fingerprint(model, tokenizer)
    assert fingerprint != model_fingerprint(plain, tokenizer)
    return fingerprint


def test_quantised_layers(smollm2_tokenizer):
    model = quantised()
    fingerprint = check_quantised(model, smollm2_tokenizer, 1e-3)
    model.model.layers[1].mlp.down_proj.scale[0] *= 2
    assert model_fingerprint(model, smollm2_tokenizer) != fingerprint


def test_the_cache_has_the_dtype_in_which_layers_compute():
    """Not that of the weights that happen to come first: a float32 embedding, say."""
    model = quantised().to(torch.bfloat16)
    model.model.embed_tokens.float()
    model.model.embed_tokens.register_forward_hook(lambda *call: call[-1].bfloat16())
    assert model.dtype == torch.float32
    adapter = ModelAdapter(model)
    (shard,) = adapter.new_cache(10).shards
    assert shard.keys.dtype == shard.values.dtype == torch.bfloat16
    adapter.forward_rows(NEW, RowSet.of_range(0, 100), adapter.new_cache(100))


def test_weights_quantised_by_torchao(folder, smollm2_tokenizer):
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    model, _ = load_model(str(folder), device="cpu", quantization_config=config)
    assert type(model.model.layers[0].mlp.up_proj.weight).__name__ != "Parameter"
    check_quantised(model, smollm2_tokenizer, 1e-3)


# --- several devices, as shards of one CPU ---


@dataclass(frozen=True)
class OtherDevice(LayerPlacement):
    """A placement on the CPU that is not equal to the others there: a shard of its own."""

    number: int


def sharded(model, cuts) -> KVSequence:
    """A sequence whose caches are cut into shards in front of the layers `cuts`."""
    adapter = ModelAdapter(model)
    adapter.placements = tuple(
        OtherDevice(**asdict(place), number=sum(layer >= cut for cut in cuts))
        for layer, place in enumerate(adapter.placements)
    )
    return KVSequence(adapter, rope_of(model))


@pytest.mark.parametrize("cuts", [(1,), (1, 2)])
@pytest.mark.parametrize("policy", [PATCH, WHOLE, RecoveryPolicy.exact()], ids=lambda p: p.name)
def test_layers_on_several_devices(model, cuts, policy):
    """What is stored, restored, scored and decoded is the same however the layers are cut."""
    outcomes = []
    for sequence in (sequence_of(model), sharded(model, cuts)):
        sequence.resume(OLD, policy)
        sequence.append(5)
        sequence.suspend()
        resumed = sequence.resume(NEW, policy)
        logits = torch.stack([resumed.logits, sequence.append(7)])
        shards = sequence.live_cache.shards
        sequence.suspend()
        outcomes.append((logits, sequence.checkpoint, [len(shard.layers) for shard in shards]))
    (logits, checkpoint, one), (other_logits, other, several) = outcomes
    assert one == [3] and several == [1, 3 - len(cuts), 1][: len(cuts) + 1]
    assert torch.equal(logits, other_logits)
    assert np.array_equal(checkpoint.scores, other.scores)
    assert np.array_equal(checkpoint.origins, other.origins)
    assert len(checkpoint.extents) == len(other.extents)
    for extent, another in zip(checkpoint.extents, other.extents, strict=True):
        assert extent.payload.format is another.payload.format
        for name, tensor in extent.payload.tensors.items():
            assert torch.equal(tensor, another.payload.tensors[name]), name


def test_each_layer_has_its_own_rope_in_every_shard():
    """Gemma 3 turns the keys of its two kinds of layers by different frequencies."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 4, 2, 60, 16, generator=generator)
    frequencies = np.stack([[1.0, 0.1], [0.5, 0.01], [0.5, 0.01], [1.0, 0.1]]).astype(np.float32)
    rope = Rope(frequencies, RopeLayout.HALF_SPLIT)
    ranges = [(0, 32, 0), (32, 60, 32)]
    shards = [CacheShard(0, keys[:2], values[:2]), CacheShard(2, keys[2:], values[2:])]
    for format in (PayloadFormat.K8V8, PayloadFormat.K8V4, PayloadFormat.NATIVE):
        whole = quantize_gather(keys, values, ranges, format=format, rope=rope)
        parts = gather(shards, ranges, format=format, rope=rope)
        for name, tensor in whole.tensors.items():
            assert torch.equal(tensor, parts.tensors[name]), name
        again = gather(shards, ranges, format=format, rope=rope, channels=whole.key_channels)
        assert again.key_channels is whole.key_channels
        assert torch.equal(again.keys, whole.keys)


def test_16_bit_rows_of_all_shards_have_one_dtype():
    """Values too large for float16 in one shard only: bfloat16 in all, since a payload has one."""
    keys, values = torch.ones(2, 2, 1, 32, 16)
    values[1] *= 1e6
    shards = [CacheShard(0, keys[:1], values[:1]), CacheShard(1, keys[1:], values[1:])]
    rope = Rope(np.ones(4, dtype=np.float32), RopeLayout.HALF_SPLIT)
    payload = gather(shards, [(0, 32, 0)], format=PayloadFormat.F16, rope=rope)
    assert payload.keys.dtype == torch.float16 and payload.values.dtype == torch.bfloat16
    assert payload.values[0].eq(1).all() and payload.values[1].isfinite().all()


def test_native_rows_of_layers_of_several_dtypes_lose_nothing():
    """They were joined in bfloat16, and a float32 layer came back rounded in exact recovery."""
    generator = torch.Generator().manual_seed(0)
    rope = Rope(np.ones(8, dtype=np.float32), RopeLayout.HALF_SPLIT)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    rows = [torch.randn(2, 1, 2, 40, 16, generator=generator).to(dtype) for dtype in dtypes]
    shards = [CacheShard(n, *pair) for n, pair in enumerate(rows)]
    extents = store_rows(shards, np.ones(40, bool), rope)
    targets = [CacheShard(n, *torch.empty_like(pair)) for n, pair in enumerate(rows)]
    Restoration(extents, targets, rope, lambda layer: None).ready(2)
    for pair, target in zip(rows, targets, strict=True):
        assert torch.equal(target.keys, pair[0]) and torch.equal(target.values, pair[1])


def test_layers_of_a_shard_may_be_passed_over():
    """Asked for the last layer first, a restoration still writes those in front of it."""
    keys, values = torch.randn(2, 3, 2, 40, 16)
    rope = Rope(np.ones(4, dtype=np.float32), RopeLayout.HALF_SPLIT)
    shards = [CacheShard(n, keys[n : n + 1], values[n : n + 1]) for n in range(3)]
    extents = store_rows(shards, np.ones(40, bool), rope)
    new = torch.full((2, 3, 2, 40, 16), torch.nan)
    targets = [CacheShard(n, new[0, n : n + 1], new[1, n : n + 1]) for n in range(3)]
    waited: list[int] = []
    Restoration(extents, targets, rope, waited.append).ready(2)
    assert waited == [3] and torch.equal(new[0], keys) and torch.equal(new[1], values)
