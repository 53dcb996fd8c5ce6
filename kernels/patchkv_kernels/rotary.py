"""Rotates stored keys to another position, directly into their destination rows.

A key at position w is `R(w) k`; the same key at position r is `R(r) k = R(r - w) R(w) k`
(RoFormer, arXiv 2104.09864, eq. 14: rotations by position compose). Keys are therefore moved with
one rotation, on the way from the checkpoint into the cache, and never rotated in place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch


class RopeLayout(str, Enum):
    """Layout of channel pairs: (i, i + rotary_dim/2) or (2i, 2i + 1)."""

    HALF_SPLIT = "half_split"
    INTERLEAVED = "interleaved"


@dataclass(frozen=True, slots=True)
class Rope:
    """Frequencies and layout of a model's rotary embedding.

    Attributes:
        inv_freq: the model's own float32 frequencies, `[rotary_dim / 2]`; where its layers differ,
            `[layers, rotary_dim / 2]`, zeros for a layer that does not rotate its keys.
        layout: which channels form a pair.
        widths: number of pairs that each layer rotates, where that differs; the rest of a row of
            `inv_freq` is zero. None: all.
    """

    inv_freq: npt.NDArray[np.float32]
    layout: RopeLayout
    widths: tuple[int, ...] | None = None

    def of_layers(self, layers: range) -> Rope:
        """The rope of some consecutive layers."""
        if self.inv_freq.ndim == 1:
            return self
        part = self.inv_freq[layers.start : layers.stop]
        if self.widths is None:
            return replace(self, inv_freq=part)
        widths = self.widths[layers.start : layers.stop]
        if len(set(widths)) == 1:
            return replace(self, inv_freq=part[:, : widths[0]], widths=None)
        return replace(self, inv_freq=part, widths=widths)

    def runs(self, layers: range) -> list[tuple[range, Rope]]:
        """Consecutive layers of equal frequencies, and the rope of each such run, of one row."""
        if self.inv_freq.ndim == 1:
            return [(layers, self)]
        part = self.inv_freq[layers.start : layers.stop]
        starts = [0, *(1 + np.flatnonzero((part[1:] != part[:-1]).any(axis=1))).tolist()]
        return [
            (range(layers.start + a, layers.start + b), replace(self, inv_freq=part[a]))
            for a, b in zip(starts, [*starts[1:], len(part)], strict=True)
        ]

    def angles(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The angles at which the model writes keys, `[tokens, rotary_dim / 2]`.

        Where layers differ, `[layers, tokens, rotary_dim / 2]`. The product is rounded to float32
        as the model rounds it: at position 4,000 that rounding is worth 2e-4 radians, which a
        rotation by the exact difference would not remove.
        """
        product = positions.astype(np.float32)[:, None] * self.inv_freq[..., None, :]
        return product.astype(np.float64)

    def rotation(
        self,
        written: npt.NDArray[np.int64],
        wanted: npt.NDArray[np.int64],
        device: torch.device,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine that take keys from positions `written` to positions `wanted`.

        Args:
            written, wanted: int64 `[tokens]`.

        Returns:
            float32 `[tokens, rotary_dim / 2]` each. Any magnitude that the model multiplies its
            keys with (YaRN) is in the keys already and is not applied again.
        """
        angle = self.angles(wanted) - self.angles(written)
        cos = torch.from_numpy(np.cos(angle).astype(np.float32))
        sin = torch.from_numpy(np.sin(angle).astype(np.float32))
        return cos.to(device), sin.to(device)


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
