"""The checkpoint of a context version: token ids, stored KV rows, and how exact each row is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from patchkv_agents.checkpoint.block_map import BlockMap
from patchkv_agents.checkpoint.extents import Extent, merged, moved_extents, stored_mask
from patchkv_agents.checkpoint.repack import repacked, used_rows
from patchkv_agents.ranges import BoolArray, IntArray, common_prefix
from patchkv_kernels.payload import PayloadFormat

QUANTISED_ORIGIN: dict[PayloadFormat, int] = {
    PayloadFormat.F16: -1,
    PayloadFormat.K8V8: -2,
    PayloadFormat.K8V4: -3,
    PayloadFormat.K4V4: -4,
}
"""Origin of a row that was computed exactly and stored in a lossy format, by format."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """KV state of one version outside the model. Immutable; versions share payloads.

    Attributes:
        token_ids: every token whose state was computed, int64 `[tokens]`.
        origins: int16 `[tokens]`: 0 is exact; g + 1 is `stale(g)`, a row restored across g edits,
            or computed while it saw a row that was not exact (g = 0); negative is
            `quantised(format)`, see `QUANTISED_ORIGIN`.
        scores: attention mass each token received, float32 `[tokens]`, sums to 1 or is all zero.
        extents: stored rows, ascending and disjoint. Rows that no extent holds exist only in the
            live cache, or nowhere.
        block_map: attention between its blocks of `MAP_BLOCK` tokens, the last one cut short; None
            where it was not collected.
    """

    token_ids: IntArray
    origins: npt.NDArray[np.int16]
    scores: npt.NDArray[np.float32]
    extents: tuple[Extent, ...] = ()
    block_map: BlockMap | None = None

    def __post_init__(self) -> None:
        for array in (self.token_ids, self.origins, self.scores):
            array.setflags(write=False)

    @classmethod
    def empty(cls) -> Checkpoint:
        """The checkpoint of a thread that has not run yet."""
        return cls(
            np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int16), np.empty(0, dtype=np.float32)
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def stored(self) -> BoolArray:
        """Rows whose payload is stored, bool `[tokens]`."""
        return stored_mask(self.extents, len(self))

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payloads that the version refers to, each counted once."""
        return sum(payload.nbytes for payload in {extent.payload for extent in self.extents})

    def exact_prefix(self, token_ids: IntArray) -> int:
        """Number of stored exact rows in the common prefix with `token_ids` (int64 `[tokens]`)."""
        common = common_prefix(self.token_ids, token_ids)
        exact = (self.origins[:common] == 0) & self.stored[:common]
        return int(np.count_nonzero(exact))

    def clean_prefix(self, token_ids: IntArray) -> int:
        """Length of the common prefix with `token_ids`, up to the first stale row.

        Their rows were computed from these tokens alone; a stale row may have seen others.
        """
        common = common_prefix(self.token_ids, token_ids)
        stale = np.flatnonzero(self.origins[:common] > 0)
        return int(stale[0]) if len(stale) else common

    def with_extents(self, extents: Sequence[Extent]) -> Checkpoint:
        """The same version with other stored rows, given in any order."""
        ordered = sorted(extents, key=lambda extent: extent.position)
        return replace(self, extents=merged(ordered))

    def truncated(self, tokens: int) -> Checkpoint:
        """The first `tokens` tokens, without any data that depends on later tokens.

        Rows of a payload that is needed in part are copied. Quantised rows are dropped, since
        their scales were computed over other rows too; so are the scores, which later tokens gave,
        and the block map's row of a block that is cut.
        """
        usable = [
            extent
            for extent in self.stored_at(np.arange(min(tokens, len(self))))
            if not extent.payload.format.is_quantised
        ]
        shared = [payload for payload, used in used_rows([usable]).items() if not used.all()]
        (extents,) = repacked([usable], shared)
        return Checkpoint(
            token_ids=self.token_ids[:tokens].copy(),
            origins=self.origins[:tokens].copy(),
            scores=np.zeros(min(tokens, len(self)), dtype=np.float32),
            extents=extents,
            block_map=self.block_map and self.block_map.truncated(min(tokens, len(self))),
        )

    def stored_at(self, source: IntArray) -> tuple[Extent, ...]:
        """Stored rows at the positions of another version (see `moved_extents`)."""
        return moved_extents(self.extents, source)
