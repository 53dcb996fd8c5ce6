"""Checkpoints of several versions of one thread, side by side within a budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from patchkv_agents.checkpoint.checkpoint import Checkpoint
from patchkv_agents.checkpoint.overlap import OverlapIndex
from patchkv_agents.checkpoint.repack import repacked, used_rows, worth_repacking
from patchkv_agents.ranges import BoolArray, IntArray
from patchkv_kernels.payload import Payload

DEFAULT_BUDGET_BYTES = 2 * 2**30
MAX_VERSIONS = 20


class CheckpointVersions:
    """The checkpoints that a thread can go back to. Not safe for several threads at once.

    Versions share what they have in common, and shared payload counts once. Beyond the budget, the
    least recently used version goes; the newest always stays.

    Args:
        budget_bytes: of payload.
    """

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._kept: dict[str, Checkpoint] = {}  # least recently used first
        self._index: tuple[OverlapIndex, tuple[str, ...]] = (OverlapIndex(()), ())

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, version: object) -> bool:
        return version in self._kept

    def __iter__(self) -> Iterator[str]:
        """Names of the versions, least recently used first."""
        return iter(self._kept)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payloads, each counted once."""
        return sum(payload.nbytes for payload in self._used())

    def copy(self) -> CheckpointVersions:
        """The same versions so far, in a collection of its own. Payload is shared."""
        other = CheckpointVersions(self._budget_bytes)
        other._kept, other._index = dict(self._kept), self._index
        return other

    def emptied(self) -> CheckpointVersions:
        """A collection without versions, of the same budget."""
        return CheckpointVersions(self._budget_bytes)

    def get(self, version: str) -> Checkpoint:
        """The checkpoint of a version."""
        return self._kept[version]

    def touch(self, version: str) -> None:
        """Make a version the most recently used one."""
        self._kept[version] = self._kept.pop(version)

    def put(self, version: str, checkpoint: Checkpoint, *, repack: bool = True) -> Checkpoint:
        """Keep a checkpoint, in place of the one of that name, and drop what is over the budget.

        Args:
            version: its name.
            checkpoint: its state; every row should be stored.
            repack: whether payload may be copied together, which fitting the budget may need.
                Checkpoints that were given out before go on referring to the old payload.

        Returns:
            The checkpoint as it is kept.
        """
        self._kept.pop(version, None)
        self._kept[version] = checkpoint
        if len(self._kept) > MAX_VERSIONS:
            self._drop_oldest()
        if repack:
            self._fit()
        self._reindex()
        return self._kept[version]

    def drop(self, versions: Iterable[str]) -> None:
        """Delete versions; unknown names are ignored."""
        for version in versions:
            self._kept.pop(version, None)
        self._reindex()

    def ranked(self, token_ids: IntArray, *, exact: bool = False) -> list[tuple[int, str]]:
        """Versions by how many of `token_ids` they may hold, most first, each with that bound.

        Among equals, the most recently used comes first.

        Args:
            token_ids: of the context to recover, int64 `[tokens]`.
            exact: count only exact rows in the common prefix; otherwise see `OverlapIndex`.
        """
        index, names = self._index
        if exact:
            bounds = [self._kept[name].exact_prefix(token_ids) for name in names]
        else:
            bounds = index.bounds(token_ids)
        used = {version: rank for rank, version in enumerate(self._kept)}
        return sorted(
            zip(bounds, names, strict=True), key=lambda entry: (entry[0], used[entry[1]])
        )[::-1]

    def _drop_oldest(self) -> None:
        del self._kept[next(iter(self._kept))]

    def _used(self) -> dict[Payload, BoolArray]:
        return used_rows(checkpoint.extents for checkpoint in reversed(self._kept.values()))

    def _fit(self) -> None:
        """Bring the payload below the budget, and repack what is worth it."""
        used = self._used()
        chosen = worth_repacking(used)
        if sum(payload.nbytes for payload in used) > self._budget_bytes:
            # Well below, so that not every suspend has to copy what is kept.
            while len(self._kept) > 1 and _live_bytes(used) > self._budget_bytes * 3 // 4:
                self._drop_oldest()
                used = self._used()
            chosen = worth_repacking(used) | {p for p, mask in used.items() if not mask.all()}
        if chosen:
            newest_first = tuple(reversed(self._kept))
            extents = [self._kept[version].extents for version in newest_first]
            for version, anew in zip(newest_first, repacked(extents, chosen), strict=True):
                self._kept[version] = replace(self._kept[version], extents=anew)

    def _reindex(self) -> None:
        names = tuple(self._kept)
        self._index = OverlapIndex([self._kept[name].token_ids for name in names]), names


def _live_bytes(used: Mapping[Payload, BoolArray]) -> int:
    """Bytes of payload once only used rows are left, roughly."""
    return sum(payload.nbytes * int(mask.sum()) // payload.rows for payload, mask in used.items())
