"""The checkpoint of a context version: its tokens, where their KV rows lie, how exact they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from patchkv_agents.checkpoint.blocks import Extent, moved_extents, stored_mask
from patchkv_agents.ranges import BoolArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """State of one version outside the model. Immutable; payload is shared between versions.

    Attributes:
        token_ids: every token whose state was computed, int64 `[tokens]`.
        origins: int16 `[tokens]`: 0 is exact; g + 1 is `stale(g)`, a row restored across g edits,
            or computed while it saw a row that was not exact (g = 0).
        scores: attention mass each token received, float32 `[tokens]`, sums to 1 or is all zero.
        extents: stored rows, ascending and disjoint. Rows that no extent holds exist only in the
            live cache, or nowhere.
    """

    token_ids: IntArray
    origins: npt.NDArray[np.int16]
    scores: npt.NDArray[np.float32]
    extents: tuple[Extent, ...] = ()

    def __post_init__(self) -> None:
        for array in (self.token_ids, self.origins, self.scores):
            array.setflags(write=False)

    @classmethod
    def empty(cls) -> Checkpoint:
        """Of a thread that has not run yet."""
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
        """Bytes of all source blocks that the version refers to, each counted once."""
        blocks = {id(extent.block): extent.block.nbytes for extent in self.extents}
        return sum(blocks.values())

    def with_stored(self, extents: Sequence[Extent]) -> Checkpoint:
        """The same version with further rows stored."""
        merged = sorted((*self.extents, *extents), key=lambda extent: extent.position)
        return replace(self, extents=tuple(merged))

    def truncated(self, tokens: int) -> Checkpoint:
        """The first `tokens` tokens alone, with no payload in reach of what came behind them.

        Rows of a block that is kept in part are copied out of it, and scores are dropped, since
        later tokens gave them.
        """
        source = np.where(np.arange(len(self)) < tokens, np.arange(len(self)), -1)
        return Checkpoint(
            token_ids=self.token_ids[:tokens].copy(),
            origins=self.origins[:tokens].copy(),
            scores=np.zeros(min(tokens, len(self)), dtype=np.float32),
            extents=tuple(extent.alone() for extent in self.stored_at(source)),
        )

    def stored_at(self, source: IntArray) -> tuple[Extent, ...]:
        """Stored rows at the positions of another version (see `moved_extents`)."""
        return moved_extents(self.extents, source)
