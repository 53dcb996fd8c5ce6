"""Payload: stored KV rows of all layers in one representation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from patchkv_kernels.errors import PayloadError


class PayloadFormat(str, Enum):
    """Representations of stored keys and values.

    `NATIVE` and `F16` keep keys as the model wrote them, rotated to their write position; the
    quantised formats keep them before rotation, since rotating mixes channels and so their scales.
    """

    NATIVE = "native"
    """The model's own dtype, bit for bit."""
    F16 = "f16"
    """16 bits; the model's own bits where its dtype has 16."""
    K8V8 = "k8v8"
    K8V4 = "k8v4"
    K4V4 = "k4v4"
    """A reference for measurements; keys are never stored below 8 bits otherwise."""

    @property
    def is_quantised(self) -> bool:
        """Whether keys are stored as scaled integers, before rotation."""
        return self not in (PayloadFormat.NATIVE, PayloadFormat.F16)

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of an element of keys and of values; 16 stands for any floating-point dtype."""
        return _BITS[self]


_BITS = {
    PayloadFormat.NATIVE: (16, 16),
    PayloadFormat.F16: (16, 16),
    PayloadFormat.K8V8: (8, 8),
    PayloadFormat.K8V4: (8, 4),
    PayloadFormat.K4V4: (4, 4),
}


@dataclass(frozen=True, eq=False)  # no slots: stores hold payloads by weak reference
class Payload:
    """Stored rows of keys and values in one format, in blocks. Immutable, shared by reference.

    Layers come first, so that one layer's rows lie together and can be read alone. The rows of a
    block are consecutive in the payload and were written at consecutive positions; different
    blocks may come from anywhere in a context.

    Attributes:
        format: of all rows.
        keys: `[layers, kv_heads, rows, head_dim]` in `NATIVE` and `F16`; int8 of the same shape
            with 8-bit keys; uint8 `[..., head_dim / 2]` with 4-bit keys, two to a byte.
        values: the same for values.
        key_scales, value_scales: of the quantised tensors; see `patchkv_kernels.quantize`.
        key_channels: centre and scale of each quantised key channel, float16
            `[layers, kv_heads, 2, head_dim]`, the same for all rows.
        block_rows: first payload row of each block and the end of the last, int64
            `[blocks + 1]`, ascending from 0.
        positions: position at which the first row of each block was written, int64 `[blocks]`.
    """

    format: PayloadFormat
    keys: torch.Tensor
    values: torch.Tensor
    block_rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    key_channels: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.keys.shape[:3] != self.values.shape[:3] or self.keys.ndim != 4:
            raise PayloadError(
                f"keys {tuple(self.keys.shape)} and values {tuple(self.values.shape)} do not hold "
                "the same rows"
            )
        if len(self.block_rows) != len(self.positions) + 1 or self.block_rows[-1] != self.rows:
            raise PayloadError("block_rows and positions do not describe the rows")
        self.block_rows.setflags(write=False)
        self.positions.setflags(write=False)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.keys.shape[0]

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.keys.shape[3] * (2 if self.keys.dtype == torch.uint8 else 1)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.keys.shape[2]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, those that the format has."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors and of the block table."""
        table = self.block_rows.nbytes + self.positions.nbytes
        return sum(tensor.nbytes for tensor in self.tensors.values()) + table

    def row_blocks(self) -> npt.NDArray[np.int64]:
        """Block of each row, int64 `[rows]`."""
        return np.repeat(np.arange(len(self.positions)), np.diff(self.block_rows))

    def row_positions(self) -> npt.NDArray[np.int64]:
        """Position at which each row was written, int64 `[rows]`."""
        return np.arange(self.rows) + np.repeat(
            self.positions - self.block_rows[:-1], np.diff(self.block_rows)
        )
