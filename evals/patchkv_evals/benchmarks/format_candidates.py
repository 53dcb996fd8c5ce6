"""The quantisers among which the stored formats were chosen, in their plainest form.

Each takes keys before rotation, or values, float32 `[layers, kv_heads, rows, head_dim]`, and gives
back what storage would leave of them. Nothing is packed: bytes are counted by formula. Those that
end in "(used)" are what `patchkv_kernels.quantize` implements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from patchkv_kernels.quantize import (
    Scratch,
    decode,
    decoded_scales,
    denormalise_,
    encode_groups,
    encode_rows,
    key_channels,
    normalised,
    sampled_rows,
)

BLOCK = 32
"""Rows of a block."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to store keys or values.

    Attributes:
        name: what the table calls it.
        bits: of an element, scales counted, at a given head_dim (what is stored once for a whole
            payload is left out).
        apply: rows in, what storage leaves of them out.
    """

    name: str
    bits: Callable[[int], float]
    apply: Callable[[torch.Tensor], torch.Tensor]


def _symmetric(x: torch.Tensor, dim: int, highest: int, dtype: torch.dtype) -> torch.Tensor:
    """Codes in [-highest, highest], one scale along `dim`."""
    scale = (x.abs().amax(dim, keepdim=True) / highest).to(dtype).float()
    return (x / scale.where(scale != 0, 1.0)).round().clamp(-highest, highest) * scale


def _asymmetric(x: torch.Tensor, dim: int, levels: int) -> torch.Tensor:
    """Codes in [0, levels), a float16 scale and a float16 lowest value along `dim`."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale, low = ((high - low) / (levels - 1)).half().float(), low.half().float()
    codes = ((x - low) / scale.where(scale != 0, 1.0)).round().clamp(0, levels - 1)
    return codes * scale + low


def _by_block(x: torch.Tensor, quantise: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply to `[..., blocks, BLOCK, head_dim]`; the last block repeats its last row."""
    rows = x.shape[2]
    padding = x[:, :, -1:].expand(-1, -1, -rows % BLOCK, -1)
    padded = torch.cat([x, padding], dim=2)
    blocks = padded.view(*x.shape[:2], -1, BLOCK, x.shape[3])
    return quantise(blocks).flatten(2, 3)[:, :, :rows]


def _by_group(
    x: torch.Tensor, size: int, quantise: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Apply to `[..., groups, size]` along channels; head_dim must be a multiple of `size`."""
    return quantise(x.reshape(*x.shape[:-1], -1, size)).flatten(-2)


def _decoded(encoded: tuple[torch.Tensor, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(like)
    decode(encoded[0], decoded_scales(encoded[1]), out=out, scratch=Scratch())
    return out


def _channel_scaled(
    keys: torch.Tensor,
    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    channels = key_channels(keys[:, :, sampled_rows(keys.shape[2])])
    x = normalised(keys, channels)
    return denormalise_(_decoded(encode(x), x), channels.float())


def _centred(x: torch.Tensor, quantise: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    centre = x.mean(2, keepdim=True)
    return quantise(x - centre) + centre


def _symmetric_groups(size: int) -> Candidate:
    return Candidate(
        f"4 bits, groups of {size}, symmetric",
        lambda d: 4 + 16 / size,
        lambda v: _by_group(v, size, lambda x: _symmetric(x, -1, 7, HALF)),
    )


def _asymmetric_groups(size: int) -> Candidate:
    return Candidate(
        f"4 bits, groups of {size}, asymmetric",
        lambda d: 4 + 32 / size,
        lambda v: _by_group(v, size, lambda x: _asymmetric(x, -1, 16)),
    )


HALF = torch.float16

KEYS: tuple[Candidate, ...] = (
    Candidate(
        "8 bits, row, symmetric", lambda d: 8 + 16 / d, lambda k: _symmetric(k, -1, 127, HALF)
    ),
    Candidate("8 bits, row, asymmetric", lambda d: 8 + 32 / d, lambda k: _asymmetric(k, -1, 256)),
    Candidate(
        "8 bits, row, centred channels",
        lambda d: 8 + 16 / d,
        lambda k: _centred(k, lambda x: _symmetric(x, -1, 127, HALF)),
    ),
    Candidate(
        "8 bits, row, centred and scaled channels (used)",
        lambda d: 8 + 16 / d,
        lambda k: _channel_scaled(k, encode_rows),
    ),
    Candidate(
        "8 bits, block and channel, symmetric",
        lambda d: 8 + 16 / BLOCK,
        lambda k: _by_block(k, lambda x: _symmetric(x, 3, 127, HALF)),
    ),
    Candidate(
        "8 bits, block and channel, asymmetric",
        lambda d: 8 + 32 / BLOCK,
        lambda k: _by_block(k, lambda x: _asymmetric(x, 3, 256)),
    ),
    Candidate(
        "4 bits, groups of 32, centred and scaled channels (used)",
        lambda d: 4 + 8 / 32,
        lambda k: _channel_scaled(k, encode_groups),
    ),
    Candidate(
        "4 bits, block and channel, asymmetric",
        lambda d: 4 + 32 / BLOCK,
        lambda k: _by_block(k, lambda x: _asymmetric(x, 3, 16)),
    ),
)

VALUES: tuple[Candidate, ...] = (
    Candidate(
        "8 bits, row, symmetric (used)",
        lambda d: 8 + 16 / d,
        lambda v: _decoded(encode_rows(v), v),
    ),
    Candidate(
        "8 bits, row, symmetric, scale of 8 bits",
        lambda d: 8 + 8 / d,
        lambda v: _symmetric(v, -1, 127, torch.float8_e5m2),
    ),
    Candidate(
        "4 bits, groups of 32, signed 8-bit scale (used)",
        lambda d: 4 + 8 / 32,
        lambda v: _decoded(encode_groups(v), v),
    ),
    Candidate(
        "the same, centred channels",
        lambda d: 4 + 8 / 32,
        lambda v: _centred(v, lambda x: _decoded(encode_groups(x), x)),
    ),
    *(_symmetric_groups(size) for size in (16, 32, 64)),
    *(_asymmetric_groups(size) for size in (16, 32, 64)),
)
