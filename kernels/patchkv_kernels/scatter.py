"""Scatters stored rows into a live cache; with the CPU path that dequantises and rotates them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from patchkv_kernels.errors import PayloadError
from patchkv_kernels.payload import Payload
from patchkv_kernels.quantize import Scratch, decode, decoded_scales, denormalise_
from patchkv_kernels.rotary import Rope, RopeLayout, rotate_keys
from patchkv_kernels.row_moves import RowMoves

_IntArray = npt.NDArray[np.int64]
_Rows = slice | torch.Tensor
"""Rows of a tensor: consecutive ones, or an index, int64 `[rows]`."""

STEP_ELEMENTS = 1 << 20
"""Elements of keys, and of values, that the CPU path handles at once: enough to outweigh the cost
of starting threads for an operation, few enough for a processor's cache."""
MIN_RUN = 8
"""Mean length of consecutive rows from which they are handled as such, without an index."""


@torch.inference_mode()
def dequantize_scatter(
    payload: Payload,
    rows: _IntArray,
    slots: _IntArray,
    positions: _IntArray,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    rope: Rope,
    layers: range | None = None,
) -> None:
    """Restore rows: read them, dequantise, rotate keys to their positions, write them.

    Only `slots` are written. Unquantised keys whose position has not changed keep their bits (as
    far as the cache's dtype has them); others are rotated once, by the difference of the model's
    own angles. On a GPU the work is queued on the current stream.

    Args:
        payload: on the device of `keys`; not changed.
        rows: payload rows to read, int64 `[n]`.
        slots: destination row of each, int64 `[n]`, all different.
        positions: position at which each is wanted, int64 `[n]`.
        keys, values: destination `[layers, kv_heads, capacity, head_dim]`, any strides; changed in
            place.
        rope: what the keys were written with.
        layers: layers to do, of the payload and of the destination; all where None.

    Raises:
        PayloadError: rows or slots do not exist, or the tensors do not belong together.
    """
    moves = RowMoves.prepare(payload, rows, slots, positions, rope=rope, device=keys.device)
    scatter_rows(payload, moves, keys, values, layers=layers)


@torch.inference_mode()
def scatter_rows(
    payload: Payload,
    moves: RowMoves,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    layers: range | None = None,
) -> None:
    """`dequantize_scatter` with precomputed tables, for several calls of some layers each."""
    if layers is not None:
        part, moves = slice(layers.start, layers.stop), moves.of_layers(layers)
        payload, keys, values = _layers(payload, part), keys[part], values[part]
    _check(payload, moves, keys, values)
    if not len(moves.rows):
        return
    if keys.shape[3] != values.shape[3] and keys.is_cuda:
        scatter = _scatter_native
    elif keys.is_cuda:
        from patchkv_kernels.triton_dequantize import scatter_rows_triton as scatter
    else:
        scatter = scatter_rows_cpu
    # Triton launches on the current device.
    with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]
        for part, own in moves.runs(len(keys)):
            scatter(_layers(payload, part), own, keys[part], values[part])


def _layers(payload: Payload, layers: slice) -> Payload:
    tensors: dict[str, Any] = {name: tensor[layers] for name, tensor in payload.tensors.items()}
    return replace(payload, **tensors)


def _scatter_native(
    payload: Payload, moves: RowMoves, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Rows as the model wrote them, on any device; for keys and values of two widths."""
    stored = payload.keys.index_select(2, moves.rows)
    rotated = stored
    if moves.cos is not None and moves.sin is not None and moves.moved is not None:
        rotated = torch.empty_like(stored)
        rotate_keys(stored, moves.cos, moves.sin, layout=moves.layout, out=rotated)
        rotated = torch.where(moves.moved[:, None] != 0, rotated, stored)
    keys.index_copy_(2, moves.slots, rotated.to(keys.dtype))
    taken = payload.values.index_select(2, moves.rows)
    values.index_copy_(2, moves.slots, taken.to(values.dtype))


def scatter_rows_cpu(
    payload: Payload, moves: RowMoves, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """The CPU path: a few layers of a few rows at a time, so that they stay in its cache."""
    scratch = Scratch()
    most = max(1, STEP_ELEMENTS // (keys.shape[1] * keys.shape[3]))
    moved = np.zeros(len(moves.rows), bool) if moves.moved is None else moves.moved.numpy() != 0
    for rotate in (False, True):
        for at, rows, slots in _steps(np.flatnonzero(moved == rotate), moves, most):
            stored = _StoredRows.of(payload, rows)
            rotation = None
            if rotate and moves.cos is not None and moves.sin is not None:
                rotation = moves.cos[at], moves.sin[at]
            step = max(1, most // stored.rows)
            for first in range(0, payload.layers, step):
                group = slice(first, first + step)
                part = stored.of_layers(group)
                _scatter_values(part, values[group], slots, scratch)
                _scatter_keys(part, keys[group], slots, rotation, moves.layout, scratch)


@dataclass(frozen=True, slots=True)
class _StoredRows:
    """Rows of a payload, `[layers, kv_heads, rows, ...]`, with scales and channels in float32."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    key_channels: torch.Tensor | None

    @classmethod
    def of(cls, payload: Payload, rows: _Rows) -> _StoredRows:
        def scales(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else decoded_scales(_taken(tensor, rows))

        return cls(
            keys=_taken(payload.keys, rows),
            values=_taken(payload.values, rows),
            key_scales=scales(payload.key_scales),
            value_scales=scales(payload.value_scales),
            key_channels=None if payload.key_channels is None else payload.key_channels.float(),
        )

    @property
    def rows(self) -> int:
        return self.keys.shape[2]

    def of_layers(self, layers: slice) -> _StoredRows:
        def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[layers]

        return _StoredRows(
            self.keys[layers],
            self.values[layers],
            part(self.key_scales),
            part(self.value_scales),
            part(self.key_channels),
        )


@dataclass(frozen=True, slots=True)
class _Slots:
    """Destination rows of a step: runs `(offset in the step, first slot, end)`, or an index."""

    runs: tuple[tuple[int, int, int], ...]
    index: torch.Tensor | None

    @classmethod
    def of(cls, slots: _IntArray) -> _Slots:
        borders = _borders(slots)
        if len(slots) < MIN_RUN * (len(borders) - 1):
            return cls((), torch.from_numpy(slots))
        spans = zip(borders, borders[1:], strict=False)
        return cls(tuple((a, int(slots[a]), int(slots[b - 1]) + 1) for a, b in spans), None)

    def room(self, cache: torch.Tensor, rows: int, scratch: Scratch) -> torch.Tensor:
        """Memory in which to compute the rows: the cache if float32 and consecutive there."""
        if len(self.runs) == 1 and cache.dtype == torch.float32:
            return cache[:, :, self.runs[0][1] : self.runs[0][2]]
        shape = (*cache.shape[:2], rows, cache.shape[3])
        return scratch.take("out", shape, torch.float32, cache.device)

    def put(self, cache: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows into the cache, unless they are there already."""
        if self.index is not None:
            cache.index_copy_(2, self.index, rows.to(cache.dtype))
            return
        for offset, start, stop in self.runs:
            place = cache[:, :, start:stop]
            if place.data_ptr() != rows.data_ptr():
                place.copy_(rows[:, :, offset : offset + stop - start])


def _steps(chosen: _IntArray, moves: RowMoves, most: int) -> Iterator[tuple[_Rows, _Rows, _Slots]]:
    """Moves, payload rows and slots of each step of at most `most` rows, of the moves `chosen`."""
    rows, slots = moves.rows.numpy()[chosen], moves.slots.numpy()[chosen]
    borders = sorted({*_borders(chosen), *_borders(rows)})
    indexed = len(chosen) < MIN_RUN * (len(borders) - 1)
    if indexed:
        borders = [0, len(chosen)]
    for start, stop in zip(borders, borders[1:], strict=False):
        for first in range(start, stop, most):
            part = slice(first, min(stop, first + most))
            at, taken = _rows(chosen[part], indexed), _rows(rows[part], indexed)
            yield at, taken, _Slots.of(slots[part])


def _borders(rows: _IntArray) -> list[int]:
    """Where runs of consecutive rows begin, and the end of the last."""
    return [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]


def _rows(rows: _IntArray, indexed: bool) -> _Rows:
    """An index, or the range that consecutive rows are."""
    return torch.from_numpy(rows) if indexed else slice(int(rows[0]), int(rows[-1]) + 1)


def _taken(tensor: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """Rows `[layers, kv_heads, rows, ...]`: a view of consecutive ones, else a copy."""
    return tensor[:, :, rows] if isinstance(rows, slice) else tensor.index_select(2, rows)


def _scatter_values(
    stored: _StoredRows, values: torch.Tensor, slots: _Slots, scratch: Scratch
) -> None:
    rows = stored.values
    if stored.value_scales is not None:
        rows = slots.room(values, stored.rows, scratch)
        decode(stored.values, stored.value_scales, out=rows, scratch=scratch)
    slots.put(values, rows)


def _scatter_keys(
    stored: _StoredRows,
    keys: torch.Tensor,
    slots: _Slots,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    layout: RopeLayout,
    scratch: Scratch,
) -> None:
    if rotation is None:
        slots.put(keys, stored.keys)
        return
    shape = (*keys.shape[:2], stored.rows, keys.shape[3])
    unrotated = scratch.take("unrotated", shape, torch.float32, keys.device)
    if stored.key_scales is not None and stored.key_channels is not None:
        decode(stored.keys, stored.key_scales, out=unrotated, scratch=scratch)
        denormalise_(unrotated, stored.key_channels)
    else:
        unrotated.copy_(stored.keys)
    rotated = slots.room(keys, stored.rows, scratch)
    rotate_keys(unrotated, *rotation, layout=layout, out=rotated)
    slots.put(keys, rotated)


def _check(payload: Payload, moves: RowMoves, keys: torch.Tensor, values: torch.Tensor) -> None:
    expected = (*payload.keys.shape[:2], keys.shape[2], payload.head_dim)
    width = payload.head_dim if payload.format.is_quantised else payload.values.shape[3]
    if keys.shape != expected or values.shape != (*expected[:3], width):
        raise PayloadError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} cannot take rows of "
            f"{payload.layers} layers, {payload.keys.shape[1]} kv heads, head_dim "
            f"{payload.head_dim}"
        )
    if moves.slots_stop > keys.shape[2]:
        raise PayloadError(
            f"slot {moves.slots_stop - 1} lies behind the cache's {keys.shape[2]} rows"
        )
