"""Repacking: copies the rows in use of several payloads into one, byte for byte.

Edits leave payloads of which only some rows are in use, and many short turns leave many small
payloads. Rows are not encoded again: their bytes are copied to a new payload. Only payloads of one
kind can be joined: the same format, dtypes and channel statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from patchkv_agents.checkpoint.extents import Extent, merged
from patchkv_agents.ranges import BoolArray, IntArray, ranges_of
from patchkv_kernels.payload import Payload

Extents = Sequence[Extent]


def used_rows(versions: Iterable[Extents]) -> dict[Payload, BoolArray]:
    """Rows of each payload that any of the versions refers to, bool `[rows]` by payload."""
    used: dict[Payload, BoolArray] = {}
    for extents in versions:
        for extent in extents:
            mask = used.setdefault(extent.payload, np.zeros(extent.payload.rows, dtype=bool))
            mask[extent.row : extent.row + extent.length] = True
    return used


def worth_repacking(used: dict[Payload, BoolArray]) -> set[Payload]:
    """Payloads that are less than half used, and groups of small payloads of similar size.

    The smallest payloads of a kind are joined as long as the next one has at most twice the rows of
    all before it (as in a log-structured merge tree). The number of payloads, and the number of
    times a row is copied, then grow with the logarithm of the rows.
    """
    chosen = {payload for payload, mask in used.items() if 2 * int(mask.sum()) < payload.rows}
    kinds: dict[Hashable, list[tuple[int, Payload]]] = {}
    for payload, mask in used.items():
        kinds.setdefault(_kind(payload), []).append((int(mask.sum()), payload))
    for members in kinds.values():
        members.sort(key=lambda entry: entry[0])
        rows, joined = 0, 0
        for index, (size, _) in enumerate(members):
            if 0 < index and size > 2 * rows:
                break
            rows, joined = rows + size, index + 1
        if joined > 1:
            chosen |= {payload for _, payload in members[:joined]}
    return chosen


def repacked(
    versions: Sequence[Extents], payloads: Collection[Payload]
) -> list[tuple[Extent, ...]]:
    """The extents of all `versions` with the used rows of `payloads` moved to new payloads.

    There is one new payload for each kind; rows lie in it in the order in which `versions` have
    them, so the first version's extents become the fewest.
    """
    new_row = {payload: np.full(payload.rows, -1, dtype=np.int64) for payload in payloads}
    kind_of = {payload: _kind(payload) for payload in payloads}
    pieces: dict[Hashable, list[_Piece]] = {}
    placed: dict[Hashable, int] = {}
    for extents in versions:
        for extent in extents:
            if extent.payload not in new_row:
                continue
            kind = kind_of[extent.payload]
            rows = new_row[extent.payload][extent.row : extent.row + extent.length]
            for start, stop in ranges_of(rows < 0):
                piece = _Piece(extent.payload, extent.row + start, extent.row + stop)
                pieces.setdefault(kind, []).append(piece)
                first = placed.get(kind, 0)
                rows[start:stop] = np.arange(first, first + stop - start)
                placed[kind] = first + stop - start
    joined = {kind: _join(parts) for kind, parts in pieces.items()}
    return [
        merged(
            part
            for extent in extents
            for part in (
                _renamed(extent, joined[kind_of[extent.payload]], new_row[extent.payload])
                if extent.payload in new_row
                else (extent,)
            )
        )
        for extents in versions
    ]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows `[start, stop)` of a payload."""

    payload: Payload
    start: int
    stop: int


def _renamed(extent: Extent, payload: Payload, new_row: IntArray) -> Iterable[Extent]:
    """The rows of `extent` where they lie in their new payload."""
    rows = new_row[extent.row : extent.row + extent.length]
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    for start, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), len(rows)], strict=True):
        yield Extent(payload, int(rows[start]), stop - start, extent.position + start)


def _kind(payload: Payload) -> Hashable:
    """Equal for payloads whose rows may lie together."""
    channels = payload.tensors.get("key_channels")
    statistics = b"" if channels is None else channels.view(torch.uint8).numpy().tobytes()
    return payload.format, payload.keys.dtype, payload.values.dtype, statistics


def _join(pieces: Sequence[_Piece]) -> Payload:
    """One payload of all the pieces, which are of one kind, in order."""
    lengths: list[int] = []
    positions: list[int] = []
    for piece in pieces:
        borders = piece.payload.block_rows
        first = int(np.searchsorted(borders, piece.start, side="right")) - 1
        last = int(np.searchsorted(borders, piece.stop))
        starts = np.maximum(borders[first:last], piece.start)
        stops = np.minimum(borders[first + 1 : last + 1], piece.stop)
        lengths += (stops - starts).tolist()
        positions += (piece.payload.positions[first:last] + starts - borders[first:last]).tolist()
    by_row = [name for name in pieces[0].payload.tensors if name != "key_channels"]
    tensors: dict[str, Any] = {
        name: _concatenated(
            [piece.payload.tensors[name][:, :, piece.start : piece.stop] for piece in pieces]
        )
        for name in by_row
    }
    return replace(
        pieces[0].payload,
        block_rows=np.cumsum([0, *lengths]),
        positions=np.array(positions, dtype=np.int64),
        **tensors,
    )


def _concatenated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts along dimension 2, in memory of the same kind (pinned or not) as the first's."""
    shape = list(parts[0].shape)
    shape[2] = sum(part.shape[2] for part in parts)
    out = torch.empty(shape, dtype=parts[0].dtype, pin_memory=parts[0].is_pinned())
    return torch.cat(list(parts), dim=2, out=out)
