"""The stored formats of keys and values: scales, rounding, packing. Torch, any device.

With L layers, H kv heads, R payload rows, D channels of a head (a multiple of 8) and
G = ceil(D / 32) groups of channels (the last one is shorter where 32 does not divide D):

| format | keys           | key_scales      | key_channels      | values         | value_scales    |
| ------ | -------------- | --------------- | ----------------- | -------------- | --------------- |
| NATIVE | [L,H,R,D]      |                 |                   | [L,H,R,D]      |                 |
| F16    | [L,H,R,D]      |                 |                   | [L,H,R,D]      |                 |
| K8V8   | int8 [L,H,R,D] | float16 [L,H,R] | float16 [L,H,2,D] | int8 [L,H,R,D] | float16 [L,H,R] |
| K8V4   | int8 [L,H,R,D] | float16 [L,H,R] | float16 [L,H,2,D] | uint8 [..,D/2] | uint8 [L,H,R,G] |
| K4V4   | uint8 [..,D/2] | uint8 [L,H,R,G] | float16 [L,H,2,D] | uint8 [..,D/2] | uint8 [L,H,R,G] |

- NATIVE holds the model's own dtype and F16 the same where that has 16 bits; of a float32 model
  F16 holds float16, or bfloat16 for keys or values that float16 cannot hold.
- Quantised keys are normalised first: before rotation, `x = (key - centre) / scale` by channel.
  `key_channels` holds the centres and then the scales, once for each layer and head of a payload,
  so that partial blocks add no overhead. Some models have key biases a hundred times larger than
  the differences between tokens; the centre takes them out.
- 8 bits: one scale a row, `s = max|x| / 127` rounded to float16; `code = rne(x / s)` in
  [-127, 127]; `x' = code * s`.
- 4 bits: one scale for each 32 channels, `s = m / -8`, where m is the element of largest
  magnitude with its sign (the positive one of two): of the codes -8..7 the outermost then lies on
  the larger side. Stored as the upper byte of its float16, rounded to nearest even (the format
  e5m2). `code = rne(x / s)` in [-8, 7]; `x' = code * s`.
- Byte j of a row of 4-bit codes holds channel j in its low and channel j + D/2 in its high half,
  both in two's complement.
- A row (8 bits) or group (4 bits) that holds a NaN or an infinity has the scale NaN and comes back
  as NaN. Finite values beyond the largest scale saturate. Where a scale rounds to 0, codes are 0.

Measured before these were chosen: a scale per block and channel for keys (as in KIVI, arXiv
2402.02750) takes twice the bytes of scales for 1.4 times the error. Symmetric codes -7..7 with
float16 scales have 1.1 times the error of 4-bit values at more bytes. Centring values by channel
lowers their relative error by a seventh and multiplies the KL of the next token: attention sinks
have values near zero, and count most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

GROUP = 32
"""Channels that share a 4-bit scale."""
SAMPLED_ROWS = 128
"""Rows from which the centres and scales of key channels are taken."""
SMALLEST_CHANNEL = 2.0**-10
"""Smallest scale of a key channel, as a share of the head's largest."""
FLOAT16_MAX = 65504.0
E5M2_MAX = 57344.0
_NAN_BYTE = 0x7E


def groups_of(head_dim: int) -> int:
    """Number of 4-bit scales of a row."""
    return -(-head_dim // GROUP)


def sampled_rows(rows: int) -> torch.Tensor:
    """The rows, of `rows`, from which key channels are taken: int64, evenly spaced."""
    count = min(rows, SAMPLED_ROWS)
    return torch.arange(count) * rows // max(1, count)


def key_channels(sample: torch.Tensor) -> torch.Tensor:
    """Centre and scale of each key channel: mean and root mean square distance from it.

    They only precondition the codes: any finite centre and any positive scale give a valid
    payload.

    Args:
        sample: keys before rotation, float32 `[..., rows, head_dim]`, at least one row. Elements
            that are not finite are left out.

    Returns:
        float16 `[..., 2, head_dim]`: the centres, the scales.
    """
    finite = sample.isfinite()
    count = finite.sum(-2, keepdim=True).clamp_min(1)
    known = sample.where(finite, 0.0)
    centre = ((known / count).sum(-2, keepdim=True)).clamp(-FLOAT16_MAX, FLOAT16_MAX).half()
    distance = (known - centre.float()).where(finite, 0.0)
    scale = (distance.double().square().sum(-2, keepdim=True) / count).sqrt().float()
    largest = scale.amax(-1, keepdim=True)
    scale = scale.maximum(largest * SMALLEST_CHANNEL).where(largest > 0, 1.0)
    return torch.cat([centre, scale.clamp(2.0**-14, FLOAT16_MAX).half()], dim=-2)


def normalised(keys: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """`(keys - centre) / scale`; keys float32 `[..., rows, head_dim]`, before rotation."""
    centre, scale = channels.float().unbind(-2)
    return (keys - centre.unsqueeze(-2)) / scale.unsqueeze(-2)


def encode_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes with one scale a row.

    Args:
        x: float32 `[..., head_dim]`.

    Returns:
        Codes int8 `[..., head_dim]`, scales float16 `[...]`.
    """
    largest = x.abs().amax(-1)
    scales = (largest / 127).clamp_max(FLOAT16_MAX).half()
    scales = scales.where(largest.isfinite(), torch.nan)
    return _codes(x, scales.float().unsqueeze(-1), -127, 127), scales


def encode_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """4-bit codes, two to a byte, with one scale for each group of channels.

    Args:
        x: float32 `[..., head_dim]`.

    Returns:
        Codes uint8 `[..., head_dim / 2]`, scales uint8 `[..., groups]`.
    """
    head_dim = x.shape[-1]
    padded = F.pad(x, (0, -head_dim % GROUP))
    grouped = padded.view(*x.shape[:-1], groups_of(head_dim), GROUP)
    high, low = grouped.amax(-1), grouped.amin(-1)
    peak = high.where(high >= -low, low)
    half = (peak / -8).clamp(-E5M2_MAX, E5M2_MAX).half() + 0.0  # -0 becomes 0
    scales = half.to(torch.float8_e5m2).view(torch.uint8)
    scales = scales.where(high.isfinite() & low.isfinite(), _NAN_BYTE)
    codes = _codes(grouped, decoded_scales(scales).unsqueeze(-1), -8, 7)
    first, second = codes.flatten(-2)[..., :head_dim].chunk(2, dim=-1)
    return ((first & 15) | (second << 4)).view(torch.uint8), scales


def _codes(x: torch.Tensor, scales: torch.Tensor, lowest: int, highest: int) -> torch.Tensor:
    """Rounded quotients, int8, shape of `x`; 0 where the scale is 0 or NaN."""
    quotients = x / scales.where(scales != 0, 1.0)
    return quotients.round_().clamp_(lowest, highest).nan_to_num_(0.0).to(torch.int8)


def decoded_scales(scales: torch.Tensor) -> torch.Tensor:
    """Stored scales of either kind as float32."""
    if scales.dtype == torch.uint8:
        scales = (scales.to(torch.int16) << 8).view(torch.float16)
    return scales.float()


class Scratch:
    """Reusable buffers; allocating memory would cost more than the work done in it."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A contiguous tensor with arbitrary content; the same memory for the same name."""
        elements = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < elements:
            buffer = self._buffers[name] = torch.empty(elements, dtype=dtype, device=device)
        return buffer[:elements].view(*shape)


def decode(
    codes: torch.Tensor, scales: torch.Tensor, *, out: torch.Tensor, scratch: Scratch
) -> None:
    """Write what `encode_rows` or `encode_groups` encoded into `out`.

    Args:
        codes: as they were encoded, int8 for 8 bits, uint8 for 4.
        scales: the `decoded_scales`.
        out: float32 `[..., head_dim]`, any strides.
        scratch: for what lies between.
    """
    if codes.dtype == torch.int8:
        out.copy_(codes).mul_(scales.unsqueeze(-1))
        return
    half = codes.shape[-1]
    signed = codes.view(torch.int8)
    aligned = scratch.take("codes", codes.shape, torch.int8, codes.device)
    unscaled = scratch.take("unscaled", codes.shape, torch.float32, codes.device)
    # Each code is left in the upper half of its byte, which makes it 16 times as large.
    sixteenths = scales / 16
    for first in (0, half):
        if first == 0:
            torch.mul(signed, 16, out=aligned)
        else:
            torch.bitwise_and(signed, -16, out=aligned)
        unscaled.copy_(aligned)
        # One product for each group, as far as it lies in this half.
        for start in range(first // GROUP * GROUP, first + half, GROUP):
            part = slice(max(start, first), min(start + GROUP, first + half))
            torch.mul(
                unscaled[..., part.start - first : part.stop - first],
                sixteenths[..., start // GROUP : start // GROUP + 1],
                out=out[..., part],
            )


def denormalise_(x: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """`centre + scale * x`, in place; the reverse of `normalised`. `channels` in float32."""
    centre, scale = channels.unbind(-2)
    return torch.addcmul(centre.unsqueeze(-2), scale.unsqueeze(-2), x, out=x)
