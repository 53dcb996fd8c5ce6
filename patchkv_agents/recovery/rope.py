"""The model's rotary position embedding, as far as moving stored keys needs it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from patchkv_agents.ranges import IntArray
from patchkv_kernels import RopeLayout


@dataclass(frozen=True, slots=True)
class Rope:
    """Frequencies and layout of a model's rotary embedding.

    Attributes:
        inv_freq: the model's own float32 frequencies, `[rotary_dim / 2]`.
        layout: which channels form a pair.
    """

    inv_freq: npt.NDArray[np.float32]
    layout: RopeLayout

    def _angles(self, positions: IntArray) -> npt.NDArray[np.float64]:
        """The angles at which the model writes keys, `[tokens, rotary_dim / 2]`.

        The product is rounded to float32 as the model rounds it: at position 4,000 that rounding
        is worth 2e-4 radians, which a rotation by the real-valued difference would leave behind.
        """
        product = positions.astype(np.float32)[:, None] * self.inv_freq[None, :]
        return product.astype(np.float64)

    def rotation(
        self, written: IntArray, wanted: IntArray, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine that take keys from positions `written` to positions `wanted`.

        Args:
            written, wanted: int64 `[tokens]`.

        Returns:
            float32 `[tokens, rotary_dim / 2]` each. Any magnitude that the model multiplies its
            keys with (YaRN) is in the keys already and is not applied again.
        """
        angle = self._angles(wanted) - self._angles(written)
        cos = torch.from_numpy(np.cos(angle).astype(np.float32))
        sin = torch.from_numpy(np.sin(angle).astype(np.float32))
        return cos.to(device), sin.to(device)
