"""What storage leaves of a prompt's rows, to be put in place of the exact ones block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from patchkv_agents.backends.transformers.adapter import RowCache
from patchkv_agents.checkpoint.shards import CacheShard, gather
from patchkv_agents.engine import Engine
from patchkv_agents.errors import UnsupportedModelError
from patchkv_agents.profiling.forced import ExactPrompt
from patchkv_agents.ranges import BoolArray, RowSet, ranges_of
from patchkv_kernels import PayloadFormat, dequantize_scatter


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """The first rows of a cache as they come back from storage.

    Attributes:
        shards: as those of the cache; on the CPU, `[layers, kv_heads, rows, head_dim]`.
        row_bytes: of the payload, by row; scales and tables counted.
    """

    shards: tuple[CacheShard, ...]
    row_bytes: float

    def write(self, cache: RowCache, rows: BoolArray) -> None:
        """Put `rows` (bool `[rows]`) in place of those of the cache."""
        for start, stop in ranges_of(rows):
            for own, shard in zip(self.shards, cache.shards, strict=True):
                shard.keys[:, :, start:stop] = own.keys[:, :, start:stop]
                shard.values[:, :, start:stop] = own.values[:, :, start:stop]


def exact_rows(cache: RowCache, rows: int) -> StoredRows:
    """A copy of the first `rows` rows, in the cache's dtype.

    `row_bytes` counts them as stored in 16 bits, two bytes an element, whatever the copy takes.
    """
    shards = tuple(
        CacheShard(
            shard.first,
            *(each[:, :, :rows].to("cpu", copy=True) for each in (shard.keys, shard.values)),
        )
        for shard in cache.shards
    )
    elements = sum(shard.keys[:, :, :1].numel() for shard in shards)
    return StoredRows(shards, 4.0 * elements)


@torch.inference_mode()
def stored_rows(
    engine: Engine, cache: RowCache, lengths: Sequence[int], format: PayloadFormat
) -> StoredRows:
    """The first rows of a cache, stored in one format and restored where they were.

    Args:
        engine: whose rows they are.
        cache: not changed.
        lengths: of the blocks, from row 0 on.
        format: of all blocks.

    Raises:
        UnsupportedModelError: rows of this model are always stored losslessly.
    """
    if engine.adapter.head_dim % 8:
        raise UnsupportedModelError(
            f"heads of {engine.adapter.head_dim} are stored losslessly: there is no precision to "
            "choose"
        )
    stops = np.cumsum(lengths).tolist()
    ranges = [
        (stop - length, stop, stop - length) for stop, length in zip(stops, lengths, strict=True)
    ]
    rows, shards, payload_bytes = stops[-1], [], 0
    everything = np.arange(rows)
    for shard in cache.shards:
        payload = gather([shard], ranges, format=format, rope=engine.rope)
        shape = (*shard.keys.shape[:2], rows, shard.keys.shape[3])
        own = CacheShard(shard.first, *(torch.empty(shape, dtype=shard.keys.dtype) for _ in "kv"))
        dequantize_scatter(
            payload,
            everything,
            everything,
            everything,
            own.keys,
            own.values,
            rope=engine.rope.of_layers(shard.layers),
        )
        payload_bytes += payload.nbytes
        shards.append(own)
    return StoredRows(tuple(shards), payload_bytes / rows)


class LoweredPrompt:
    """A prompt whose rows are put into stored formats and back.

    Args:
        engine: of the prompt's model.
        prompt: its cache is changed.
        lengths: of the blocks, as for `stored_rows`.
        formats: that rows can be put into.

    Raises:
        UnsupportedModelError: rows of this model are always stored losslessly.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: ExactPrompt,
        lengths: Sequence[int],
        formats: Sequence[PayloadFormat],
    ) -> None:
        self._engine, self._prompt = engine, prompt
        self._stored = [
            exact_rows(prompt.cache, sum(lengths)),
            *(stored_rows(engine, prompt.cache, lengths, format) for format in formats),
        ]
        self._now = np.zeros(sum(lengths), dtype=np.int8)

    def measured(self, codes: npt.NDArray[np.int8]) -> tuple[float, float]:
        """Stored bytes, relative to 16 bits, and the divergence of the prompt's answer.

        Args:
            codes: of each row, 0 for exact and n for the n-th format, int8 `[rows]`.
        """
        for code, stored in enumerate(self._stored):
            stored.write(self._prompt.cache, (codes == code) & (self._now != code))
        self._now = codes
        row_bytes = np.array([stored.row_bytes for stored in self._stored])
        divergence = self._prompt.divergence(self._engine, self._prompt.cache, RowSet(()))
        return float(row_bytes[codes].mean() / row_bytes[0]), divergence.kl


def block_lengths(rows: int, block: int) -> list[int]:
    """Lengths of the blocks of `rows` rows; the last one may be shorter."""
    return [min(block, rows - start) for start in range(0, rows, block)]
