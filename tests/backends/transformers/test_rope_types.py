"""Moved keys against rotation written here: complex numbers in float64, frequencies by formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from patchkv_agents.backends.transformers.support import support_of
from patchkv_kernels import PayloadFormat, dequantize_scatter, quantize_gather
from tests.engine.models import plain_rows, random_ids

from .families import CONFIGS, model_of

TOKENS, SHIFT = 97, 300


def frequencies(parameters, channels):
    """Radians per position of each channel pair, by the formulas of the papers, in float64.

    RoFormer (arXiv 2104.09864) eq. 15; linear interpolation (2306.15595) eq. 4; YaRN (2309.00071)
    eqs. 17 to 23; Llama 3 as in Meta's reference code (a ramp between two wavelengths).
    """
    base = parameters["rope_theta"]
    plain = base ** (-np.arange(0, channels, 2, dtype=np.float64) / channels)
    kind = parameters["rope_type"]
    if kind == "default":
        return plain
    factor = parameters["factor"]
    if kind == "linear":
        return plain / factor
    original = parameters["original_max_position_embeddings"]
    turns = original * plain / (2 * math.pi)  # full turns within the original context
    if kind == "llama3":
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        share = np.clip((turns - low) / (high - low), 0, 1)
        return share * plain + (1 - share) * plain / factor
    assert kind == "yarn"

    def channel_of(turns):
        return channels * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = math.floor(channel_of(32)), math.ceil(channel_of(1))
    first, last = max(first, 0), min(last, channels - 1)
    interpolated = np.clip((np.arange(channels // 2) - first) / (last - first), 0, 1)
    return interpolated * plain / factor + (1 - interpolated) * plain


def turned(keys, positions, radians, layout):
    """`[..., tokens, head_dim]` turned by position times `radians` in each pair of channels."""
    pairs = len(radians)
    first, second = {
        "half_split": (np.arange(pairs), np.arange(pairs) + pairs),
        "interleaved": (np.arange(0, 2 * pairs, 2), np.arange(1, 2 * pairs, 2)),
    }[layout]
    out = keys.astype(np.float64)
    numbers = out[..., first] + 1j * out[..., second]
    numbers = numbers * np.exp(1j * positions[:, None] * radians)
    out[..., first], out[..., second] = numbers.real, numbers.imag
    return out


def moved_by_us(model, keys, values, shift):
    rows = np.arange(TOKENS)
    rope = support_of(model).rope
    payload = quantize_gather(
        keys, values, [(0, TOKENS, 0)], format=PayloadFormat.NATIVE, rope=rope
    )
    moved = torch.empty_like(keys)
    dequantize_scatter(
        payload, rows, rows, rows + shift, moved, torch.empty_like(values), rope=rope
    )
    return moved.numpy()


@pytest.mark.parametrize(
    ("name", "layout", "share"),
    [
        ("mistral", "half_split", 1.0),
        ("llama", "half_split", 1.0),
        ("llama-linear", "half_split", 1.0),
        ("llama-yarn", "half_split", 1.0),
        ("Llama-3.3-70B", "half_split", 1.0),
        ("Qwen2.5-7B with YaRN", "half_split", 1.0),
        ("phi3", "half_split", 0.75),
        ("glm4_moe", "half_split", 0.5),
        ("glm", "interleaved", 0.5),
        ("GLM-4-9B-0414", "interleaved", 0.5),
    ],
)
def test_moved_keys_are_turned_by_the_distance(name, layout, share):
    config = CONFIGS[name]()
    model = model_of(config)
    keys, values = plain_rows(model, random_ids(3, TOKENS))
    radians = frequencies(config.rope_parameters, int(keys.shape[3] * share))
    expected = turned(keys.numpy(), np.full(TOKENS, SHIFT), radians, layout)
    actual = moved_by_us(model, keys, values, SHIFT)
    scale = float(keys.square().mean().sqrt())
    np.testing.assert_allclose(actual, expected, atol=1e-4 * scale, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama-yarn", "Qwen2.5-7B with YaRN"])
def test_the_magnitude_of_yarn_is_applied_once(name):
    """From the projection, before any rotation: factor 0.1 ln(s) + 1 (arXiv 2309.00071, eq. 22)
    once, however far the key is moved."""
    config = CONFIGS[name]()
    model = model_of(config)
    ids = random_ids(3, TOKENS)
    keys, values = plain_rows(model, ids)
    layer = model.model.layers[0]
    with torch.inference_mode():
        hidden = layer.input_layernorm(model.model.embed_tokens(torch.from_numpy(ids)))
        bare = layer.self_attn.k_proj(hidden).view(TOKENS, *keys.shape[1:4:2]).transpose(0, 1)
    magnitude = 0.1 * math.log(config.rope_parameters["factor"]) + 1.0
    radians = frequencies(config.rope_parameters, keys.shape[3])
    positions = np.arange(TOKENS) + SHIFT
    expected = turned(bare.numpy() * magnitude, positions, radians, "half_split")
    actual = moved_by_us(model, keys, values, SHIFT)[0]
    scale = float(keys.square().mean().sqrt())
    np.testing.assert_allclose(actual, expected, atol=1e-4 * scale, rtol=1e-4)
    assert magnitude > 1.1


def test_layers_without_rope_are_not_turned():
    model = model_of(CONFIGS["smollm3"]())
    keys, values = plain_rows(model, random_ids(3, TOKENS))
    actual = moved_by_us(model, keys, values, SHIFT)
    plain = [layer for layer in range(4) if np.array_equal(actual[layer], keys[layer].numpy())]
    assert plain == [n for n, has_rope in enumerate(model.config.no_rope_layers) if not has_rope]
    assert len(plain) == 2


def test_layers_of_two_ropes_are_turned_by_their_own():
    config = CONFIGS["gemma3_text"]()
    model = model_of(config)
    keys, values = plain_rows(model, random_ids(3, TOKENS))
    actual = moved_by_us(model, keys, values, SHIFT)
    scale = float(keys.square().mean().sqrt())
    for layer, kind in enumerate(config.layer_types):
        radians = frequencies(config.rope_parameters[kind], keys.shape[3])
        expected = turned(keys[layer].numpy(), np.full(TOKENS, SHIFT), radians, "half_split")
        np.testing.assert_allclose(actual[layer], expected, atol=1e-4 * scale, rtol=1e-4)
    bases = {parameters["rope_theta"] for parameters in config.rope_parameters.values()}
    assert len(bases) == 2
