"""Models whose layers are rotated differently: each layer as if it were alone with its own rope."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patchkv_kernels import (
    PayloadError,
    PayloadFormat,
    Rope,
    RopeLayout,
    RowMoves,
    dequantize_scatter,
    quantize_gather,
    scatter_rows,
)

LAYERS, TOKENS, SHIFT = 5, 33, 70
LOCAL, GLOBAL, NONE = ([1.0, 0.1, 0.02, 0.005], [0.5, 0.03, 0.004, 0.0001], [0.0] * 4)
ROPE = Rope(np.array([LOCAL, LOCAL, GLOBAL, NONE, LOCAL], dtype=np.float32), RopeLayout.INTERLEAVED)
RANGES = [(3, 20, 100), (20, 36, 7)]
ROWS = np.arange(TOKENS)
POSITIONS = np.where(ROWS % 5 == 0, ROWS, ROWS + SHIFT)


@pytest.fixture
def cache():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, LAYERS, 3, 40, 16, generator=generator)


def alone(layer):
    return Rope(ROPE.inv_freq[layer], ROPE.layout)


def restored(payload, rope, layers=None):
    keys, values = torch.full((2, LAYERS, 3, 200, 16), torch.nan)
    part = slice(None) if layers is None else slice(layers.start, layers.stop)
    slots = ROWS * 2
    dequantize_scatter(payload, ROWS, slots, POSITIONS, keys, values, rope=rope, layers=layers)
    return keys[part][:, :, slots], values[part][:, :, slots]


def layer_of(tensor, layer):
    return tensor[layer : layer + 1]


@pytest.mark.parametrize("format", PayloadFormat, ids=lambda format: format.value)
def test_each_layer_is_as_if_alone(format, cache):
    """Stored and restored, bit for bit."""
    payload = quantize_gather(*cache, RANGES, format=format, rope=ROPE)
    keys, values = restored(payload, ROPE)
    assert not keys.isnan().any()
    for layer in range(LAYERS):
        own = quantize_gather(
            *(layer_of(rows, layer) for rows in cache), RANGES, format=format, rope=alone(layer)
        )
        for name, tensor in own.tensors.items():
            assert torch.equal(layer_of(payload.tensors[name], layer), tensor), name
        own_keys = torch.full((1, 3, 200, 16), torch.nan)
        own_values = own_keys.clone()
        dequantize_scatter(own, ROWS, ROWS * 2, POSITIONS, own_keys, own_values, rope=alone(layer))
        assert torch.equal(own_keys[:, :, ROWS * 2], layer_of(keys, layer))
        assert torch.equal(own_values[:, :, ROWS * 2], layer_of(values, layer))


@pytest.mark.parametrize("format", [PayloadFormat.NATIVE, PayloadFormat.K8V4])
def test_some_layers_at_a_time_are_all_layers(format, cache):
    """As a restore streams them: by range, and with tensors of one layer only."""
    payload = quantize_gather(*cache, RANGES, format=format, rope=ROPE)
    keys, values = restored(payload, ROPE)
    for layers in (range(0, 2), range(2, 5), range(3, 4)):
        part = slice(layers.start, layers.stop)
        some_keys, some_values = restored(payload, ROPE, layers)
        assert torch.equal(some_keys, keys[part]) and torch.equal(some_values, values[part])
    moves = RowMoves.prepare(payload, ROWS, ROWS, POSITIONS, rope=ROPE, device=torch.device("cpu"))
    for layer in range(LAYERS):
        own_keys, own_values = torch.full((2, LAYERS, 3, TOKENS, 16), torch.nan)
        scatter_rows(payload, moves, own_keys, own_values, layers=range(layer, layer + 1))
        assert torch.equal(own_keys[layer], keys[layer])
        assert own_keys[layer + 1 :].isnan().all() and own_keys[:layer].isnan().all()
    with pytest.raises(PayloadError, match="made for 5 layers"):
        short = quantize_gather(*cache[:, :2], RANGES, format=format, rope=alone(0))
        scatter_rows(short, moves, own_keys[:2], own_values[:2])


def test_shared_channels_are_used_layer_by_layer(cache):
    first = quantize_gather(*cache, RANGES, format=PayloadFormat.K8V4, rope=ROPE)
    again = quantize_gather(
        *cache, RANGES, format=PayloadFormat.K8V4, rope=ROPE, channels=first.key_channels
    )
    assert again.key_channels is first.key_channels
    assert all(torch.equal(t, first.tensors[name]) for name, t in again.tensors.items())


def test_a_layer_without_rope_keeps_its_bits(cache):
    payload = quantize_gather(*cache, RANGES, format=PayloadFormat.NATIVE, rope=ROPE)
    keys, _ = restored(payload, ROPE)
    rows = torch.cat([cache[0, 3, :, 3:20], cache[0, 3, :, 20:36]], dim=1)
    assert torch.equal(keys[3], rows)
