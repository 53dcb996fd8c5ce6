"""Offload: copies rows of a live cache to CPU memory that no payload holds yet.

Rows are encoded once, from the bits that the model wrote. An incomplete block at the end of the
context is stored losslessly (`NATIVE`) and encoded when it is complete. The same holds for rows
that had to be stored early because an edit moved them while the cache was live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from patchkv_agents.checkpoint.checkpoint import QUANTISED_ORIGIN, Checkpoint
from patchkv_agents.checkpoint.extents import Extent, extents_of
from patchkv_agents.checkpoint.precision import PrecisionPolicy, block_formats
from patchkv_agents.checkpoint.shards import CacheShard, are_even, gather
from patchkv_agents.ranges import BoolArray, mask_of, ranges_of
from patchkv_kernels import PayloadFormat, Rope
from patchkv_kernels.payload import Payload

BLOCK_SIZE = 32
"""Tokens of a source block."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows `[row, row + length)` of a tensor, written at `written` and now at `position`."""

    row: int
    length: int
    written: int
    position: int

    @property
    def source(self) -> tuple[int, int, int]:
        """First row, end, write position."""
        return self.row, self.row + self.length, self.written


_Source = tuple[Sequence[CacheShard], list[_Block]]
"""All layers of a cache or a payload, and blocks of it."""


@torch.inference_mode()
def store_rows(shards: Sequence[CacheShard], rows: BoolArray, rope: Rope) -> tuple[Extent, ...]:
    """Copy rows of a live cache, bit for bit, into one payload.

    Args:
        shards: all layers of the cache; not changed.
        rows: positions to store, bool `[tokens]`.
        rope: of the model.
    """
    blocks = list(_live_blocks(rows))
    if not blocks:
        return ()
    ranges = [block.source for block in blocks]
    payload = gather(shards, ranges, format=PayloadFormat.NATIVE, rope=rope)
    return extents_of(payload, [block.position for block in blocks])


@torch.inference_mode()
def offload(
    checkpoint: Checkpoint,
    shards: Sequence[CacheShard],
    *,
    rope: Rope,
    precision: PrecisionPolicy | None,
) -> Checkpoint:
    """A checkpoint in which every row is stored.

    Args:
        checkpoint: of the context whose rows the cache holds.
        shards: all layers of the cache; not changed.
        rope: of the model.
        precision: chooses formats; None stores every row losslessly. So do heads whose size is
            not a multiple of 8, and layers of several sizes (latents among them).

    Returns:
        A new checkpoint. Rows that lose precision change their origin from exact to quantised.
    """
    stored = checkpoint.stored
    if precision is None or shards[0].keys.shape[3] % 8 or not are_even(shards):
        return checkpoint.with_extents((*checkpoint.extents, *store_rows(shards, ~stored, rope)))
    tokens = len(checkpoint)
    native = [e for e in checkpoint.extents if e.payload.format is PayloadFormat.NATIVE]
    # A row that was stored as it is and has not moved since is the same, bit for bit, in the cache.
    unmoved = mask_of([(e.position, e.stop) for e in native if not e.delta], tokens)
    complete = np.arange(tokens) < _complete(tokens)
    sources = [(shards, list(_live_blocks((~stored | unmoved) & complete)))]
    sources += _native_sources([extent for extent in native if extent.delta], tokens)
    encoded = _encoded(checkpoint, sources, rope, precision)
    anew = mask_of([(extent.position, extent.stop) for extent in encoded], tokens)
    unchanged = checkpoint.stored_at(np.where(anew, -1, np.arange(tokens)))
    tail = store_rows(shards, ~stored & ~anew, rope)
    return replace(
        checkpoint.with_extents((*unchanged, *encoded, *tail)),
        origins=_origins(checkpoint.origins, encoded, shards[0].keys.dtype),
    )


@torch.inference_mode()
def packed(checkpoint: Checkpoint, *, rope: Rope, precision: PrecisionPolicy) -> Checkpoint:
    """The checkpoint with its losslessly stored rows in the formats that `precision` chooses.

    The result is that of an `offload` with this precision in the first place. Nothing is packed
    where the size of heads is not a multiple of 8.

    Args:
        checkpoint: every row is stored.
        rope: of the model.
        precision: chooses formats.
    """
    tokens = len(checkpoint)
    native = [e for e in checkpoint.extents if e.payload.format is PayloadFormat.NATIVE]
    if not native or native[0].payload.keys.shape[3] % 8:
        return checkpoint
    encoded = _encoded(checkpoint, _native_sources(native, tokens), rope, precision)
    anew = mask_of([(extent.position, extent.stop) for extent in encoded], tokens)
    unchanged = checkpoint.stored_at(np.where(anew, -1, np.arange(tokens)))
    return replace(
        checkpoint.with_extents((*unchanged, *encoded)),
        origins=_origins(checkpoint.origins, encoded, native[0].payload.keys.dtype),
    )


def _complete(tokens: int) -> int:
    """Tokens in complete blocks."""
    return tokens // BLOCK_SIZE * BLOCK_SIZE


def _native_sources(native: Sequence[Extent], tokens: int) -> list[_Source]:
    """The complete blocks of losslessly stored rows, payload by payload."""
    by_payload: dict[Payload, list[_Block]] = {}
    for extent in native:
        blocks = by_payload.setdefault(extent.payload, [])
        blocks += _stored_blocks(extent, _complete(tokens))
    return [([CacheShard(0, p.keys, p.values)], blocks) for p, blocks in by_payload.items()]


def _encoded(
    checkpoint: Checkpoint, sources: Sequence[_Source], rope: Rope, precision: PrecisionPolicy
) -> list[Extent]:
    """The blocks of all sources in the formats that `precision` chooses."""
    channels = _channels(checkpoint.extents)
    encoded: list[Extent] = []
    for source, blocks in sources:
        if not blocks:
            continue
        rows = np.concatenate([np.arange(b.position, b.position + b.length) for b in blocks])
        formats = block_formats(
            precision,
            [values for shard in source for values in shard.values],
            [block.source for block in blocks],
            checkpoint.scores[rows],
            tokens=len(checkpoint),
        )
        # The format with most rows first: its payload gives the channel statistics of the others.
        for format, _ in Counter(formats).most_common():
            own = [b for b, chosen in zip(blocks, formats, strict=True) if chosen is format]
            payload = gather(
                source,
                [block.source for block in own],
                format=format,
                rope=rope,
                channels=channels,
            )
            extents = extents_of(payload, [block.position for block in own])
            channels = _channels(extents) if channels is None else channels
            encoded += extents
    return encoded


def _live_blocks(rows: BoolArray) -> Iterator[_Block]:
    """Rows of a cache (bool `[tokens]`), cut where the grid of `BLOCK_SIZE` tokens cuts them."""
    for start, stop in ranges_of(rows):
        for first, last in _cut(start, stop):
            yield _Block(row=first, length=last - first, written=first, position=first)


def _stored_blocks(extent: Extent, stop: int) -> Iterator[_Block]:
    """Rows of an extent before position `stop`, cut in the same way."""
    for first, last in _cut(extent.position, min(extent.stop, stop)):
        part = extent.part(first, last)
        yield _Block(part.row, part.length, part.written, part.position)


def _cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        border = min(stop, (start // BLOCK_SIZE + 1) * BLOCK_SIZE)
        yield start, border
        start = border


def _channels(extents: Sequence[Extent]) -> torch.Tensor | None:
    """The channel statistics of quantised rows; all share the same, so that they can be joined."""
    shared = (extent.payload.key_channels for extent in extents)
    return next((channels for channels in shared if channels is not None), None)


def _origins(
    origins: npt.NDArray[np.int16], encoded: Sequence[Extent], dtype: torch.dtype
) -> npt.NDArray[np.int16]:
    """Origins once the `encoded` rows of a model of this dtype have been stored."""
    origins = origins.copy()
    for extent in encoded:
        format = extent.payload.format
        lossless = format is PayloadFormat.NATIVE or (
            format is PayloadFormat.F16 and extent.payload.keys.dtype == dtype
        )
        if not lossless:
            rows = origins[extent.position : extent.stop]
            rows[rows == 0] = QUANTISED_ORIGIN[format]
    return origins
