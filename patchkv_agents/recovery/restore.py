"""Writing stored rows into a live cache at their new positions, layer by layer where that pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from patchkv_agents.checkpoint import Extent
from patchkv_agents.checkpoint.shards import CacheShard, unfolded
from patchkv_agents.ranges import IntArray
from patchkv_kernels import Rope, RowMoves, scatter_rows
from patchkv_kernels.payload import Payload

ARRIVING_LAYERS = 8
"""Layers that are written together on a CPU while rows are still on their way into memory. One by
one costs more than waiting for a few."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows of one payload on their way; `rows` are those read, int64 `[rows]`."""

    payload: Payload
    rows: IntArray
    moves: RowMoves


class SideStream:
    """A CUDA stream beside the model's; what is queued on it begins after what the model has now.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._events: dict[int, torch.cuda.Event] = {}  # by layer

    def queue(self, layer: int, job: Callable[[], None]) -> None:
        """Queue the work of one layer."""
        with torch.cuda.stream(self._stream):
            job()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._events[layer] = event

    def wait(self, layer: int) -> None:
        """Let what the model is given from now on begin after the work of a layer."""
        if layer in self._events:
            torch.cuda.current_stream(self._device).wait_event(self._events[layer])

    def synchronize(self) -> None:
        """Wait until nothing that was queued runs any more."""
        self._stream.synchronize()


def side_stream(device: torch.device) -> SideStream | None:
    """A stream for writing beside the model; None where a device has none."""
    return SideStream(device) if device.type == "cuda" else None


class _ShardWriter:
    """Writes rows into one shard, on a GPU on a stream of its own. `parts` are what is read."""

    def __init__(self, shard: CacheShard, parts: Sequence[_Part]) -> None:
        self.shard = shard
        self._parts = parts
        self._stream = side_stream(shard.device)

    @property
    def most_layers(self) -> int:
        """Layers to write at once while rows are still on their way into memory."""
        return 1 if self._stream is not None else ARRIVING_LAYERS

    @torch.inference_mode()
    def write(self, layers: range) -> None:
        """Write some layers of the shard; on a GPU, queue it."""
        if self._stream is None:
            self._write(layers)
            return
        for layer in layers:
            self._stream.queue(layer, partial(self._write, range(layer, layer + 1)))

    def wait(self, layer: int) -> None:
        """Let what is computed from now on begin after a layer has been written."""
        if self._stream is not None:
            self._stream.wait(layer)

    def stop(self) -> None:
        """Wait until nothing is written any more."""
        if self._stream is not None:
            self._stream.synchronize()

    def _write(self, layers: range) -> None:
        first = self.shard.first
        own = slice(layers.start - first, layers.stop - first)
        for part in self._parts:
            staged = _staged(part.payload, layers, self.shard.device)
            moves = part.moves.of_layers(layers)
            keys, values = self.shard.keys[own], self.shard.values[own]
            staged = replace(
                staged, keys=_as_in(staged, "keys", keys), values=_as_in(staged, "values", values)
            )
            scatter_rows(staged, moves, keys, values)


class Restoration:
    """Stored rows on their way into a cache. Only these rows are written.

    On a CPU the rows of all layers are written at once, which is faster there than layer by layer
    just before each is read. On a GPU each layer has its own copy and kernel on a stream beside
    the model's, all queued at once: while the model computes a layer, the next ones arrive. Where
    rows are still on their way into memory, layers are written when the model asks for them.

    Args:
        extents: stored rows at their positions in the new version.
        shards: all layers of the cache; changed in place.
        rope: what the keys were written with.
        arrived: waits until the first n layers of every payload are in memory; None if all are.
    """

    def __init__(
        self,
        extents: Sequence[Extent],
        shards: Sequence[CacheShard],
        rope: Rope,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        self._arrived = arrived
        parts = {device: _grouped(extents, rope, device) for device in {s.device for s in shards}}
        self._parts = parts[shards[0].device]
        self._writers = [_ShardWriter(shard, parts[shard.device]) for shard in shards]
        self._written = 0
        if arrived is None:
            try:
                self._write(shards[-1].layers.stop)
            except BaseException:
                self.stop()
                raise

    @property
    def payload_bytes(self) -> int:
        """Bytes of the source blocks that are read, whole blocks counted once."""
        return sum(_bytes_read(part) for part in self._parts)

    @property
    def formats(self) -> dict[str, int]:
        """Number of rows by the format from which they come."""
        counts: dict[str, int] = {}
        for part in self._parts:
            name = part.payload.format.value
            counts[name] = counts.get(name, 0) + len(part.rows)
        return counts

    def ready(self, layer: int) -> None:
        """See to it that the rows of `layer` are in place for what is computed from now on.

        Layers are asked for in ascending order; any of them again at will.
        """
        writer = next(writer for writer in self._writers if layer in writer.shard.layers)
        if layer >= self._written:
            stop = min(writer.shard.layers.stop, layer + writer.most_layers)
            if self._arrived is not None:
                self._arrived(stop)
            self._write(stop)
        writer.wait(layer)

    def stop(self) -> None:
        """Wait until nothing is written any more, as before the cache is freed after a failure.

        A side stream's writes may still be queued then, and the memory would be another tensor's.
        """
        for writer in self._writers:
            writer.stop()

    def _write(self, stop: int) -> None:
        """Write the layers before `stop` that are not written yet."""
        for writer in self._writers:
            own = writer.shard.layers
            layers = range(max(self._written, own.start), min(stop, own.stop))
            if layers:
                writer.write(layers)
        self._written = stop


def _grouped(extents: Sequence[Extent], rope: Rope, device: torch.device) -> list[_Part]:
    """The rows of each payload, with the tables for moving them on `device`."""
    by_payload: dict[Payload, list[Extent]] = {}
    for extent in extents:
        by_payload.setdefault(extent.payload, []).append(extent)
    parts = []
    for payload, own in by_payload.items():
        rows = np.concatenate([np.arange(e.row, e.row + e.length) for e in own])
        slots = np.concatenate([np.arange(e.position, e.stop) for e in own])
        moves = RowMoves.prepare(payload, rows, slots, slots, rope=rope, device=device)
        parts.append(_Part(payload, rows, moves))
    return parts


def _staged(payload: Payload, layers: range, device: torch.device) -> Payload:
    """Some layers of a payload on the device; on a GPU, queued on the current stream."""
    own = slice(layers.start, layers.stop)
    tensors: dict[str, Any] = {
        name: tensor[own].to(device, non_blocking=True) for name, tensor in payload.tensors.items()
    }
    return replace(payload, **tensors)


def _as_in(payload: Payload, name: str, cache: torch.Tensor) -> torch.Tensor:
    """A payload's keys or values in the shape of their cache."""
    tensor: torch.Tensor = getattr(payload, name)
    return tensor if payload.format.is_quantised else unfolded(tensor, cache)


def _bytes_read(part: _Part) -> int:
    payload = part.payload
    blocks = np.unique(payload.row_blocks()[part.rows])
    rows = int(np.diff(payload.block_rows)[blocks].sum())
    return sum(tensor.nbytes for tensor in payload.tensors.values()) * rows // payload.rows
