"""How much of what a block attended to an edit changed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from patchkv_agents.alignment import Alignment
from patchkv_agents.checkpoint.block_map import BlockMap


def edit_mass(block_map: BlockMap, alignment: Alignment) -> npt.NDArray[np.float32]:
    """Share of each old block's attention that went to edited blocks, float32 `[blocks]`.

    Directly, or through one other block: d = A (e + (1 - e) A e), A the map and e 1 for edited
    blocks; from 0 to 1. Edited are blocks that lost tokens, and those on both sides of a pure
    insertion with old tokens behind it.

    Rank correlation with the drift of the values, in the mean of eight edits of four kinds
    (HotpotQA, 1,500 tokens, SmolLM2-135M, four layers in the map): 0.89, of blocks more than 128
    tokens behind the edit 0.80; the distance has 0.86 and 0.72. Through no other block 0.88 and
    0.79, through up to three 0.90 and 0.81; but with only two layers in the map, up to three have
    0.80 and 0.67, where one has 0.85 and 0.72.

    Args:
        block_map: of the old version.
        alignment: of the old version with the new one.
    """
    size = block_map.block_size
    edited = np.zeros(len(block_map.mass), dtype=np.float32)
    for hunk in alignment.hunks:
        if hunk.old_start < hunk.old_stop:
            edited[hunk.old_start // size : (hunk.old_stop - 1) // size + 1] = 1
        elif hunk.old_stop < alignment.tokens_old:
            edited[max(hunk.old_start - 1, 0) // size : hunk.old_start // size + 1] = 1
    directly = block_map.mass @ edited
    mass: npt.NDArray[np.float32] = block_map.mass @ (edited + (1 - edited) * directly)
    return mass
