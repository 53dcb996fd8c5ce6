"""A version's tokens as a strip: what was exact, new, recomputed and restored."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from patchkv_agents.recovery.plan import RecoveryPlan, RowLabel

KINDS = ("exact", "new", "recomputed", "restored")
MAX_RUNS = 96

_KIND_OF = np.full(len(RowLabel), KINDS.index("recomputed"), dtype=np.int8)
_KIND_OF[RowLabel.PREFIX] = KINDS.index("exact")
_KIND_OF[RowLabel.NEW] = KINDS.index("new")
_KIND_OF[RowLabel.RESTORED] = KINDS.index("restored")

Strip = tuple[tuple[int, int], ...]
"""Runs of tokens in order: index into `KINDS`, and length."""


def counts(plan: RecoveryPlan) -> dict[str, int]:
    """Tokens of each kind."""
    found = np.bincount(_KIND_OF[plan.labels], minlength=len(KINDS))
    return dict(zip(KINDS, map(int, found), strict=True))


def strip(plan: RecoveryPlan, most: int = MAX_RUNS) -> Strip:
    """The kinds of a plan's tokens in order.

    Where there are more than `most` runs, the tokens are divided into `most` cells, each of which
    shows the kind that is most frequent in it: short runs are lost then.
    """
    kinds = _KIND_OF[plan.labels]
    runs = _runs(kinds)
    if len(runs) <= most:
        return runs
    edges = np.linspace(0, len(kinds), most + 1).astype(int)
    cells = [
        np.full(stop - start, np.bincount(kinds[start:stop]).argmax(), dtype=np.int8)
        for start, stop in zip(edges[:-1], edges[1:], strict=True)
    ]
    return _runs(np.concatenate(cells))


def _runs(kinds: npt.NDArray[np.int8]) -> Strip:
    starts = np.flatnonzero(np.diff(kinds, prepend=-1))
    lengths = np.diff(starts, append=len(kinds))
    return tuple(
        (int(kinds[start]), int(length)) for start, length in zip(starts, lengths, strict=True)
    )
