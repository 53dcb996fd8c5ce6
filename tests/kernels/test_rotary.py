"""Rotation of stored keys against complex multiplication in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchkv_kernels import RopeLayout, rotate_keys

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def reference(keys, angle, layout, rotary_dim):
    """Each channel pair as one complex number, turned by e^(i angle)."""
    rotary = keys[..., :rotary_dim].double()
    if layout is RopeLayout.HALF_SPLIT:
        pairs = torch.stack(rotary.chunk(2, dim=-1), dim=-1)
    else:
        pairs = rotary.unflatten(-1, (-1, 2))
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    turned = torch.view_as_real(turned)
    if layout is RopeLayout.HALF_SPLIT:
        turned = torch.cat(turned.unbind(-1), dim=-1)
    else:
        turned = turned.flatten(-2)
    return torch.cat([turned, keys[..., rotary_dim:].double()], dim=-1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", RopeLayout, ids=lambda layout: layout.value)
@given(
    tokens=st.sampled_from([1, 3, 33, 97]),
    kv_heads=st.sampled_from([1, 3, 9]),
    head_dim=st.sampled_from([8, 24, 64]),
    share=st.sampled_from([0.5, 1.0]),
    seed=st.integers(0, 100),
)
def test_rotation_equals_complex_multiplication(
    dtype, layout, tokens, kv_heads, head_dim, share, seed
):
    rotary_dim = int(head_dim * share)
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, kv_heads, tokens, head_dim, generator=generator).to(dtype)
    angle = torch.rand(tokens, rotary_dim // 2, generator=generator, dtype=torch.float64) * 9000
    before = keys.clone()
    # A destination inside a larger buffer, poisoned: only its own rows may be written.
    buffer = torch.full((2, kv_heads, tokens + 4, head_dim), float("nan"), dtype=dtype)
    rotate_keys(
        keys,
        angle.cos().float(),
        angle.sin().float(),
        layout=layout,
        out=buffer[:, :, 2 : tokens + 2],
    )
    assert torch.equal(keys, before)
    assert buffer[:, :, :2].isnan().all() and buffer[:, :, tokens + 2 :].isnan().all()
    actual = buffer[:, :, 2 : tokens + 2].double()
    expected = reference(keys, angle, layout, rotary_dim)
    tolerance = TOLERANCE[dtype]
    error = (actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < tolerance
    torch.testing.assert_close(actual, expected, atol=8 * tolerance, rtol=tolerance)
