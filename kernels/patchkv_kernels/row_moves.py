"""Row moves: the index and rotation tables of one restore, computed once for all layers.

The tables depend on rows and positions only, not on the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from patchkv_kernels.errors import PayloadError
from patchkv_kernels.payload import Payload
from patchkv_kernels.rotary import Rope, RopeLayout

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RowMoves:
    """Rows of a payload, their destination rows and their rotations, on the destination's device.

    Attributes:
        rows, slots: payload row and destination row of each move, int64 `[moves]`.
        cos, sin: float32 `[moves, rotary_dim / 2]`; None where no key is rotated. Where layers
            differ, `[tables, moves, rotary_dim / 2]`.
        tables: by layer, the index of its table; None where all layers have the same.
        widths: number of pairs of each table that are rotated; None: all.
        moved: uint8 `[moves]`, 0 where a key is copied bit for bit; None where none is rotated.
        layout: how the model pairs channels.
        slots_stop: one past the last slot.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    moved: torch.Tensor | None
    layout: RopeLayout
    slots_stop: int
    tables: tuple[int, ...] | None = None
    widths: tuple[int, ...] | None = None

    @classmethod
    def prepare(
        cls,
        payload: Payload,
        rows: IntArray,
        slots: IntArray,
        positions: IntArray,
        *,
        rope: Rope,
        device: torch.device,
    ) -> RowMoves:
        """Make the tables; queued on the current stream of `device`, without waiting for it.

        Args:
            payload: read for its format, blocks and write positions only.
            rows: payload rows, int64 `[moves]`.
            slots: their destination rows, all different, the same.
            positions: their wanted positions, the same.
            rope: what the keys were written with.
            device: of the destination.

        Raises:
            PayloadError: the three do not belong together, or name rows that do not exist.
        """
        source, target, wanted = (np.asarray(array, np.int64) for array in (rows, slots, positions))
        if not len(source) == len(target) == len(wanted):
            raise PayloadError("rows, slots and positions must have one entry per moved row")
        if len(source) and not 0 <= source.min() <= source.max() < payload.rows:
            raise PayloadError(f"rows must lie in [0, {payload.rows}), the payload's rows")
        if len(target) and target.min() < 0:
            raise PayloadError("slots must not be negative")
        # Quantised keys are stored before rotation: as if written at position 0.
        quantised = payload.format.is_quantised
        written = np.zeros_like(wanted) if quantised else payload.row_positions()[source]
        moved = np.full(len(source), True) if quantised else written != wanted
        table = to_device(np.stack([source, target]), device)
        cos = sin = flags = tables = widths = None
        if moved.any():
            if rope.inv_freq.ndim == 2:
                pairs = rope.widths or (rope.inv_freq.shape[1],) * len(rope.inv_freq)
                keys = np.column_stack([np.array(pairs, dtype=np.float32), rope.inv_freq])
                distinct, of_layer = np.unique(keys, axis=0, return_inverse=True)
                tables = tuple(of_layer.ravel().tolist())
                widths = None if rope.widths is None else tuple(map(int, distinct[:, 0]))
                rope = Rope(np.ascontiguousarray(distinct[:, 1:]), rope.layout)
            cos, sin = rotation_table(rope, written, wanted, device)
            flags = to_device(moved.astype(np.uint8), device)
        return cls(
            rows=table[0],
            slots=table[1],
            cos=cos,
            sin=sin,
            moved=flags,
            layout=rope.layout,
            slots_stop=int(target.max()) + 1 if len(target) else 0,
            tables=tables,
            widths=widths,
        )

    def of_layers(self, layers: range) -> RowMoves:
        """The moves of some consecutive layers, at least one."""
        if self.tables is None:
            return self
        tables = self.tables[layers.start : layers.stop]
        return replace(self, tables=tables) if len(set(tables)) > 1 else self._of_table(tables[0])

    def runs(self, layers: int) -> Iterator[tuple[slice, RowMoves]]:
        """Consecutive ones of `layers` layers that share a table, and the moves of each such run.

        Raises:
            PayloadError: the moves were made for another number of layers.
        """
        if self.tables is None:
            yield slice(0, layers), self
            return
        if len(self.tables) != layers:
            raise PayloadError(f"the moves were made for {len(self.tables)} layers, not {layers}")
        start = 0
        for table, run in groupby(self.tables):
            stop = start + len(list(run))
            yield slice(start, stop), self._of_table(table)
            start = stop

    def _of_table(self, table: int) -> RowMoves:
        if self.cos is None or self.sin is None:
            return replace(self, tables=None)
        width = self.cos.shape[2] if self.widths is None else self.widths[table]
        cos, sin = (full[table, :, :width].contiguous() for full in (self.cos, self.sin))
        return replace(self, cos=cos, sin=sin, tables=None, widths=None)


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy of the array on the device; through pinned memory, without waiting for a GPU."""
    tensor = torch.from_numpy(np.array(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def rotation_table(
    rope: Rope,
    written: IntArray,
    wanted: IntArray,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Rope.rotation`, computed on the device: cosine and sine, `[rows, rotary_dim / 2]` each.

    With frequencies in rows, one such table for each row of them. A table, since a difference of
    angles needs float64, and since it serves all heads and many layers.
    """
    positions = to_device(np.stack([written, wanted]).astype(np.float32), device)
    frequencies = to_device(rope.inv_freq, device)
    before, after = ((row[:, None] * frequencies[..., None, :]).double() for row in positions)
    angle = after - before
    return angle.cos().float(), angle.sin().float()
