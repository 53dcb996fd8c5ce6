"""The codes and scales of the stored formats, against plain arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchkv_kernels.quantize import (
    GROUP,
    Scratch,
    decode,
    decoded_scales,
    denormalise_,
    encode_groups,
    encode_rows,
    groups_of,
    key_channels,
    normalised,
    sampled_rows,
)

HEAD_DIMS = [8, 24, 64, 80, 96, 128]


def random(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def decoded(encoded, like):
    # A destination inside a larger one, poisoned: only its own elements may be written.
    frame = torch.full((*like.shape[:-2], like.shape[-2] + 2, like.shape[-1]), torch.nan)
    out = frame[..., 1:-1, :]
    codes, scales = encoded
    decode(codes, decoded_scales(scales), out=out, scratch=Scratch())
    assert frame[..., 0, :].isnan().all() and frame[..., -1, :].isnan().all()
    return out


@given(
    rows=st.sampled_from([1, 3, 33]),
    head_dim=st.sampled_from(HEAD_DIMS),
    exponent=st.integers(-3, 4),
    seed=st.integers(0, 1000),
)
def test_8_bits_are_within_half_a_step_of_each_element(rows, head_dim, exponent, seed):
    x = random(2, rows, head_dim, seed=seed, scale=10.0**exponent)
    codes, scales = encode_rows(x)
    assert codes.dtype == torch.int8 and scales.dtype == torch.float16
    steps = scales.float().unsqueeze(-1)
    error = (decoded((codes, scales), x) - x).abs()
    # float16 scales may be rounded down by 2^-11, or by 2^-25 where they are subnormal: the
    # outermost code then falls short by that.
    assert (error <= steps / 2 + 127 * (steps * 2.0**-10).clamp_min(2.0**-25)).all()


@given(
    rows=st.sampled_from([1, 3, 33]),
    head_dim=st.sampled_from(HEAD_DIMS),
    exponent=st.integers(-2, 3),
    seed=st.integers(0, 1000),
)
def test_4_bits_are_within_half_a_step_of_what_the_codes_reach(rows, head_dim, exponent, seed):
    """Up to two steps beyond: 7 < 8, and a scale may be rounded down by an eighth."""
    x = random(2, rows, head_dim, seed=seed, scale=10.0**exponent)
    codes, scales = encode_groups(x)
    assert codes.dtype == scales.dtype == torch.uint8
    assert codes.shape[-1] == head_dim // 2 and scales.shape[-1] == groups_of(head_dim)
    steps = decoded_scales(scales).repeat_interleave(GROUP, dim=-1)[..., :head_dim]
    error = (decoded((codes, scales), x) - x).abs()
    reached = (x / steps >= -8) & (x / steps <= 7)
    assert (error <= steps.abs() * 0.501).where(reached, True).all()
    assert (error <= steps.abs() * 2.01).all()


def test_4_bit_codes_lie_in_halves_and_in_twos_complement():
    """Element by element, without vectors: what the layout in the module's text says."""
    x = random(3, 80)
    codes, scales = encode_groups(x)
    steps = decoded_scales(scales)
    expected = torch.empty_like(x)
    for row in range(3):
        for channel in range(80):
            byte = int(codes[row, channel % 40])
            code = byte >> 4 if channel >= 40 else byte & 15
            expected[row, channel] = (code - 16 if code > 7 else code) * steps[row, channel // 32]
    assert torch.equal(decoded((codes, scales), x), expected)


def test_4_bit_scales_are_the_upper_bytes_of_float16():
    x = random(50, 64)
    _, scales = encode_groups(x)
    peaks = x.view(50, 2, 32).gather(-1, x.view(50, 2, 32).abs().argmax(-1, keepdim=True))[..., 0]
    exact = (peaks / -8).numpy().astype(np.float16)
    stored = (scales.numpy().astype(np.uint16) << 8).view(np.float16)
    # Two bits of mantissa behind the first one: the nearest is within an eighth.
    assert (np.abs(stored - exact) <= np.abs(exact) / 8).all()
    assert (np.sign(stored) == np.sign(exact)).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_outermost_4_bit_code_is_on_the_side_of_the_largest_element(sign):
    x = torch.linspace(-0.5, 0.5, 32).repeat(2).view(1, 64).clone()
    x[0, 5] = sign * 8.0  # a scale that eight bits hold exactly
    restored = decoded(encode_groups(x), x)
    assert restored[0, 5] == sign * 8.0


@pytest.mark.parametrize("encode", [encode_rows, encode_groups])
def test_zeros_come_back_as_zeros(encode):
    x = torch.zeros(2, 64)
    codes, scales = encode(x)
    assert not codes.any() and not scales.any()
    assert torch.equal(decoded((codes, scales), x), x)


@pytest.mark.parametrize("encode", [encode_rows, encode_groups])
def test_rows_too_small_for_any_scale_come_back_as_zeros(encode):
    x = torch.full((1, 64), 1e-8)
    assert torch.equal(decoded(encode(x), x), torch.zeros(1, 64))


@pytest.mark.parametrize("encode", [encode_rows, encode_groups])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_comes_back_as_nan_and_harms_no_other_row(encode, bad):
    x = random(3, 64)
    x[1, 40] = bad
    restored = decoded(encode(x), x)
    clean = decoded(encode(x[[0, 2]]), x[[0, 2]])
    assert torch.equal(restored[[0, 2]], clean)
    assert restored[1, 40:].isnan().all()
    # In groups, the channels of the other group are as good as ever.
    assert restored[1, :32].isfinite().all() == (encode is encode_groups)


@pytest.mark.parametrize("encode", [encode_rows, encode_groups])
def test_huge_values_saturate(encode):
    x = random(1, 64)
    x[0, 3] = -1e20
    restored = decoded(encode(x), x)
    assert restored.isfinite().all()
    assert restored[0, 3] < -4e5


def test_channels_take_biases_and_spreads_out_of_keys():
    """Key biases a hundred times the rest (as Qwen2.5 has them) must not cost precision."""
    bias, spread = random(64, seed=1, scale=100.0), random(64, seed=2).abs() + 0.1
    keys = random(3, 200, 64) * spread + bias
    channels = key_channels(keys)
    x = normalised(keys, channels)
    restored = denormalise_(decoded(encode_rows(x), x).contiguous(), channels.float())
    plain = decoded(encode_rows(keys), keys)
    # float16 holds a centre of 100 to 1/32; what is lost is made up for by the codes.
    assert ((restored - keys) / spread).square().mean().sqrt() < 0.02
    assert ((plain - keys) / spread).square().mean().sqrt() > 0.5


def test_any_channels_give_valid_codes():
    """Channels of other keys only cost precision: rows scale by themselves."""
    keys = random(1, 40, 64, scale=3.0)
    other = key_channels(random(1, 40, 64, seed=9, scale=0.1) + 5)
    x = normalised(keys, other)
    restored = denormalise_(decoded(encode_rows(x), x).contiguous(), other.float())
    assert (restored - keys).norm() / keys.norm() < 0.05


def test_channels_of_constant_and_of_bad_keys_are_usable():
    keys = torch.ones(2, 5, 8)
    keys[0, 1, 2] = torch.nan
    keys[1, 3, 4] = torch.inf
    channels = key_channels(keys)
    assert torch.equal(channels[:, 0], torch.ones(2, 8, dtype=torch.float16))
    assert torch.equal(channels[:, 1], torch.ones(2, 8, dtype=torch.float16))
    huge = key_channels(torch.full((1, 4, 8), 1e30))
    assert huge.isfinite().all() and (huge[:, 1] > 0).all()


@pytest.mark.parametrize("rows", [1, 3, 127, 128, 129, 5000])
def test_sampled_rows_are_spread_over_all(rows):
    sample = sampled_rows(rows)
    assert len(sample) == min(rows, 128) == len(sample.unique())
    assert sample[0] == 0 and sample[-1] >= rows - 1 - rows // 128
