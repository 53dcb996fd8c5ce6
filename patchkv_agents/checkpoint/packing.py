"""Packing several versions that share rows: each row is encoded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from patchkv_agents.checkpoint.checkpoint import QUANTISED_ORIGIN, Checkpoint
from patchkv_agents.checkpoint.extents import Extent, merged
from patchkv_agents.ranges import IntArray
from patchkv_kernels.payload import Payload

Pack = Callable[[Checkpoint], Checkpoint]
"""Encodes the losslessly stored rows of a checkpoint."""


def packed_together(
    versions: Sequence[tuple[Checkpoint, Pack | None]],
) -> list[Checkpoint]:
    """The versions, each packed by its own function; None leaves one as it is.

    Rows that several versions share are encoded for the first of them, and the others refer to
    the result.
    """
    places = _Places()
    result = []
    for checkpoint, pack in versions:
        if pack is not None:
            before = places.follow(checkpoint)
            checkpoint = pack(before)
            if checkpoint is not before:
                places.note(before, checkpoint)
        result.append(checkpoint)
    return result


class _Places:
    """Where rows of payloads went that were encoded."""

    def __init__(self) -> None:
        self._targets: list[Payload] = []
        # By payload, the target of each row, as an index, and the row in it; -1 where it stayed.
        self._moved: dict[Payload, tuple[IntArray, IntArray]] = {}

    def note(self, before: Checkpoint, after: Checkpoint) -> None:
        """Record the rows of a version that lie in another payload than before."""
        source, source_row, sources = _rows(before)
        target, target_row, targets = _rows(after)
        for number, payload in enumerate(sources):
            own = np.flatnonzero(source == number)
            moved = own[[targets[t] is not payload for t in target[own].tolist()]]
            if not len(moved):
                continue
            if payload not in self._moved:
                stayed = np.full(payload.rows, -1, dtype=np.int64)
                self._moved[payload] = stayed, stayed.copy()
            to, row = self._moved[payload]
            first = len(self._targets)
            to[source_row[moved]] = first + target[moved]
            row[source_row[moved]] = target_row[moved]
        self._targets += targets

    def follow(self, checkpoint: Checkpoint) -> Checkpoint:
        """The version with its rows where they are now."""
        if not any(extent.payload in self._moved for extent in checkpoint.extents):
            return checkpoint
        extents: list[Extent] = []
        origins = checkpoint.origins.copy()
        for extent in checkpoint.extents:
            if extent.payload not in self._moved:
                extents.append(extent)
                continue
            own = slice(extent.row, extent.row + extent.length)
            to, row = (moved[own] for moved in self._moved[extent.payload])
            breaks = np.flatnonzero((np.diff(to) != 0) | ((np.diff(row) != 1) & (to[1:] >= 0))) + 1
            for start, stop in zip(
                [0, *breaks.tolist()], [*breaks.tolist(), extent.length], strict=True
            ):
                part = extent.part(extent.position + start, extent.position + stop)
                if to[start] >= 0:
                    payload = self._targets[int(to[start])]
                    part = replace(part, payload=payload, row=int(row[start]))
                    _mark(origins[part.position : part.stop], payload, extent.payload)
                extents.append(part)
        return replace(checkpoint, extents=merged(extents), origins=origins)


def _rows(checkpoint: Checkpoint) -> tuple[IntArray, IntArray, list[Payload]]:
    """Of each token, the index of its payload (-1 for none) and the row in it; the payloads."""
    payloads = list(dict.fromkeys(extent.payload for extent in checkpoint.extents))
    numbers = {payload: number for number, payload in enumerate(payloads)}
    which = np.full(len(checkpoint), -1, dtype=np.int64)
    row = which.copy()
    for extent in checkpoint.extents:
        which[extent.position : extent.stop] = numbers[extent.payload]
        row[extent.position : extent.stop] = np.arange(extent.row, extent.row + extent.length)
    return which, row, payloads


def _mark(origins: npt.NDArray[np.int16], payload: Payload, native: Payload) -> None:
    """Mark exact rows that a payload holds with loss as quantised, in place."""
    if payload.format in QUANTISED_ORIGIN and (
        payload.format.is_quantised or payload.keys.dtype != native.keys.dtype
    ):
        origins[origins == 0] = QUANTISED_ORIGIN[payload.format]
