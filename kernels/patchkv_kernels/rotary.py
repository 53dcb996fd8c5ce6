"""Rotating stored keys to another position, straight into their destination rows.

A key at position w is `R(w) k`; the same key at position r is `R(r) k = R(r - w) R(w) k`
(RoFormer, arXiv 2104.09864, eq. 14: rotations by position compose). Keys are therefore moved with
one rotation, on the way from the checkpoint into the cache, and never rotated in place.
"""

from __future__ import annotations

from enum import Enum

import torch


class RopeLayout(str, Enum):
    """Which two channels of a head form a pair: (i, i + rotary_dim/2) or (2i, 2i + 1)."""

    HALF_SPLIT = "half_split"
    INTERLEAVED = "interleaved"


def _pairs(keys: torch.Tensor, rotary_dim: int, layout: RopeLayout) -> tuple[torch.Tensor, ...]:
    """Views of the first and the second channel of every pair, `[..., rotary_dim / 2]` each."""
    rotary = keys[..., :rotary_dim]
    if layout is RopeLayout.HALF_SPLIT:
        return rotary[..., : rotary_dim // 2], rotary[..., rotary_dim // 2 :]
    return rotary[..., 0::2], rotary[..., 1::2]


def rotate_keys(
    keys: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    layout: RopeLayout,
    out: torch.Tensor,
) -> None:
    """Write `keys` rotated by per-token angles into `out`; `keys` is not changed.

    Args:
        keys: stored keys, `[..., tokens, head_dim]`, any floating dtype.
        cos, sin: cosine and sine of each token's angle, float32 `[tokens, rotary_dim / 2]`.
            Channels from `rotary_dim` on (partial rotary) are copied.
        layout: how the model pairs channels.
        out: destination rows, shape of `keys`; may be a strided view, may not overlap `keys`.

    The products are taken in float32 whatever the dtype of the keys.
    """
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim < keys.shape[-1]:
        out[..., rotary_dim:].copy_(keys[..., rotary_dim:])
    source = keys if keys.dtype == torch.float32 else keys.float()
    first, second = _pairs(source, rotary_dim, layout)
    if out.dtype == torch.float32:
        out_first, out_second = _pairs(out, rotary_dim, layout)
        torch.mul(first, cos, out=out_first)
        out_first.addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out_second)
        out_second.addcmul_(first, sin)
        return
    rotated = torch.empty_like(source[..., :rotary_dim])
    rotated_first, rotated_second = _pairs(rotated, rotary_dim, layout)
    torch.mul(first, cos, out=rotated_first)
    rotated_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated_second)
    rotated_second.addcmul_(first, sin)
    out[..., :rotary_dim].copy_(rotated)
