"""Block-to-block attention: how each block of a version attended to the blocks before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from patchkv_agents.alignment import Alignment
from patchkv_agents.ranges import IntArray

MAP_BLOCK = 32
"""Tokens per block of an engine's maps, independent of the block size of a policy."""

Mass = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class BlockMap:
    """Block-to-block attention, pooled over heads and some layers. Immutable.

    Attributes:
        block_size: tokens per block of the grid that starts at token 0.
        mass: float32 `[blocks, blocks]`, lower triangular: entry (a, b) is the share of block a's
            attention that went to block b. Rows sum to 1, or are zero where nothing is known.
    """

    block_size: int
    mass: Mass

    def __post_init__(self) -> None:
        self.mass.setflags(write=False)

    @classmethod
    def unknown(cls, tokens: int, block_size: int = MAP_BLOCK) -> BlockMap:
        """A map of `tokens` tokens in which every row is unknown (zero)."""
        blocks = -(-tokens // block_size)
        return cls(block_size, np.zeros((blocks, blocks), dtype=np.float32))

    def grown(self, tokens: int) -> BlockMap:
        """The map extended to `tokens` tokens; the new rows are unknown."""
        missing = -(-tokens // self.block_size) - len(self.mass)
        return BlockMap(self.block_size, np.pad(self.mass, (0, missing))) if missing > 0 else self

    def truncated(self, tokens: int) -> BlockMap:
        """The map of the first `tokens` tokens.

        The row of a block that is cut is dropped, since it includes tokens after the cut.
        """
        whole = min(tokens // self.block_size, len(self.mass))
        return BlockMap(self.block_size, self.mass[:whole, :whole].copy()).grown(tokens)

    def moved(self, aligned: IntArray) -> BlockMap:
        """The map of an edited version, built from this one.

        A block's row is the mean of the rows of those blocks from which its tokens came, weighted
        by their number; its new tokens do not count. A block's column goes where its tokens went,
        in equal shares; those of removed tokens go to what took their place between the same
        neighbours.

        Args:
            aligned: old position of each new token, ascending; -1 where it is new; int64
                `[tokens]`.
        """
        size, blocks = self.block_size, -(-len(aligned) // self.block_size)
        new = np.flatnonzero(aligned >= 0)
        old = aligned[new]
        if not (len(new) and self.mass.any()):
            return BlockMap.unknown(len(aligned), size)
        rows = _normalised(_summed(self.mass, old // size, new // size, blocks))
        every = np.arange(len(self.mass) * size)
        # Both neighbours of a gap are where they are; what lay in it is spread evenly.
        places = np.interp(every, old, new).astype(np.int64)
        mass = _summed(rows.T, every // size, places // size, blocks).T / np.float32(size)
        # Where a block was split, tokens of its first part would see those of its second.
        later = np.triu(mass, 1).sum(axis=1)
        mass = np.tril(mass)
        mass[np.diag_indices(blocks)] += later
        return BlockMap(size, mass)

    def refreshed(self, fresh: Mass, share: Mass) -> BlockMap:
        """The map with newly measured rows mixed in.

        Args:
            fresh: attention of those rows of each block that ran, float32 `[blocks, blocks]`, in
                any unit; zero where none was measured.
            share: of each block's tokens that ran, float32 `[blocks]`.
        """
        measured, present = fresh.any(axis=1), self.mass.any(axis=1)
        weight: Mass = np.where(measured & present, share, measured).astype(np.float32)[:, None]
        mass: Mass = weight * _normalised(fresh) + (1 - weight) * self.mass
        return BlockMap(self.block_size, mass)

    def edit_mass(self, alignment: Alignment) -> npt.NDArray[np.float32]:
        """Share of each old block's attention that went to edited blocks, float32 `[blocks]`.

        Directly, or through one other block: d = A (e + (1 - e) A e), A the map and e 1 for edited
        blocks; from 0 to 1. Edited are blocks that lost tokens, and those on both sides of a pure
        insertion with old tokens behind it.

        Rank correlation with the drift of the values, in the mean of eight edits of four kinds
        (HotpotQA, 1,500 tokens, SmolLM2-135M, four layers in the map): 0.89, of blocks more than
        128 tokens behind the edit 0.80; the distance has 0.86 and 0.72. Through no other block
        0.88 and 0.79, through up to three 0.90 and 0.81; but with only two layers in the map, up
        to three have 0.80 and 0.67, where one has 0.85 and 0.72.

        Args:
            alignment: of this version, the old one, with the new one.
        """
        size = self.block_size
        edited = np.zeros(len(self.mass), dtype=np.float32)
        for hunk in alignment.hunks:
            if hunk.old_start < hunk.old_stop:
                edited[hunk.old_start // size : (hunk.old_stop - 1) // size + 1] = 1
            elif hunk.old_stop < alignment.tokens_old:
                edited[max(hunk.old_start - 1, 0) // size : hunk.old_start // size + 1] = 1
        directly = self.mass @ edited
        mass: npt.NDArray[np.float32] = self.mass @ (edited + (1 - edited) * directly)
        return mass


def _summed(mass: Mass, source: IntArray, target: IntArray, blocks: int) -> Mass:
    """Sum, for each token, of the row of `mass` at its source into the row at its target.

    Args:
        mass: float32 `[any, columns]`.
        source, target: of each token, both ascending, int64 `[tokens]`.
        blocks: rows of the result.
    """
    starts = np.flatnonzero(np.diff(source, prepend=-1) + np.diff(target, prepend=-1))
    counts = np.diff(starts, append=len(source)).astype(np.float32)
    parts = counts[:, None] * mass[source[starts]]
    firsts = np.flatnonzero(np.diff(target[starts], prepend=-1))
    summed = np.zeros((blocks, mass.shape[1]), dtype=np.float32)
    summed[target[starts][firsts]] = np.add.reduceat(parts, firsts, axis=0)
    return summed


def _normalised(mass: Mass) -> Mass:
    """The rows divided by their sums; zero rows stay zero."""
    sums = mass.sum(axis=1, keepdims=True)
    sums[sums == 0] = 1
    normalised: Mass = mass / sums
    return normalised
