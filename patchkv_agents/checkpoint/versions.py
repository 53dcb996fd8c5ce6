"""Checkpoints of several versions of one thread, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from patchkv_agents.checkpoint.budget import BudgetEntry, MemoryBudget, live_bytes
from patchkv_agents.checkpoint.checkpoint import Checkpoint
from patchkv_agents.checkpoint.packing import Pack, packed_together
from patchkv_agents.checkpoint.repack import repacked, used_rows, worth_repacking
from patchkv_agents.ranges import BoolArray, IntArray, common_prefix
from patchkv_kernels.payload import Payload

MAX_VERSIONS = 20


@dataclass(frozen=True, slots=True)
class _Entry:
    """One version; `pack` encodes it where memory is short."""

    checkpoint: Checkpoint
    pack: Pack | None


class CheckpointVersions:
    """The checkpoints that a thread can go back to.

    Versions share what they have in common, and shared payload counts once. The budget, which
    other threads share, packs and evicts versions at any time: a version that was there may be
    gone. Safe for several Python threads.

    Args:
        budget: of all versions that share it; one of its own if left out.

    Attributes:
        is_reused: whether the thread came back after its first version: such threads are kept
            before others. To be set by the owner.
    """

    def __init__(self, budget: MemoryBudget | None = None) -> None:
        self._budget = budget or MemoryBudget()
        self._entries: dict[str, _Entry] = {}  # replaced, never changed: read without a lock
        self._ticks: dict[str, int] = {}  # last uses, of versions that are gone too at times
        self._index: tuple[OverlapIndex, tuple[str, ...]] = (OverlapIndex(()), ())
        self._used: dict[Payload, BoolArray] = {}
        self.is_reused = False
        self._budget.register(self)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, version: object) -> bool:
        return version in self._entries

    def __iter__(self) -> Iterator[str]:
        """Names of the versions, least recently used first."""
        return iter(self._oldest_first())

    @property
    def budget(self) -> MemoryBudget:
        """What the versions share with those of other threads."""
        return self._budget

    @property
    def payload_bytes(self) -> int:
        """Bytes of all payloads, each counted once."""
        return sum(payload.nbytes for payload in self.payload_rows())

    def copy(self) -> CheckpointVersions:
        """The same versions so far, in a collection of its own. Payload is shared."""
        with self._budget.lock:
            other = CheckpointVersions(self._budget)
            other._entries, other._index = self._entries, self._index
            other._ticks = dict(self._ticks)
            other._used, other.is_reused = self._used, self.is_reused
            return other

    def emptied(self) -> CheckpointVersions:
        """A collection without versions, of the same budget."""
        return CheckpointVersions(self._budget)

    def get(self, version: str) -> Checkpoint | None:
        """The checkpoint of a version; None if there is none (any more)."""
        entry = self._entries.get(version)
        return None if entry is None else entry.checkpoint

    def touch(self, version: str) -> None:
        """Make a version the most recently used one; an unknown name is ignored."""
        if version in self._entries:
            self._ticks[version] = next(self._budget.ticks)

    def put(
        self,
        version: str,
        checkpoint: Checkpoint,
        *,
        repack: bool = True,
        pack: Pack | None = None,
    ) -> Checkpoint:
        """Keep a checkpoint, in place of the one of that name, and fit all into the budget.

        Args:
            version: its name.
            checkpoint: its state; every row should be stored.
            repack: whether payload may be copied together, which fitting the budget may need.
                Checkpoints that were given out before go on referring to the old payload.
            pack: encodes its losslessly stored rows where memory is short; None never does.

        Returns:
            The checkpoint as it is kept.
        """
        with self._budget.lock:
            self._ticks[version] = next(self._budget.ticks)
            entries = {**self._entries, version: _Entry(checkpoint, pack)}
            if len(entries) > MAX_VERSIONS:
                del entries[self._oldest_first()[0]]
            self._change(entries)
            if repack:
                self._repack(worth_repacking(self._used))
                self._budget.fit()
            return self._entries[version].checkpoint

    def drop(self, versions: Iterable[str]) -> None:
        """Delete versions; unknown names are ignored."""
        with self._budget.lock:
            gone = set(versions)
            self._change({name: e for name, e in self._entries.items() if name not in gone})

    def ranked(self, token_ids: IntArray, *, exact: bool = False) -> list[tuple[int, str]]:
        """Versions by how many of `token_ids` they may hold, most first, each with that bound.

        Among equals, the most recently used comes first.

        Args:
            token_ids: of the context to recover, int64 `[tokens]`.
            exact: count only exact rows in the common prefix; otherwise see `OverlapIndex`.
        """
        index, names = self._index
        if exact:
            checkpoints = [self.get(name) for name in names]
            bounds = [each.exact_prefix(token_ids) if each else 0 for each in checkpoints]
        else:
            bounds = index.bounds(token_ids)
        used = [self._ticks.get(name, 0) for name in names]
        ranked = sorted(zip(bounds, used, names, strict=True), reverse=True)
        return [(bound, name) for bound, _, name in ranked]

    # For the budget, which holds its lock meanwhile

    def payload_rows(self) -> dict[Payload, BoolArray]:
        """Rows of each payload that some version refers to, bool `[rows]` by payload."""
        return self._used

    def entries(self) -> list[BudgetEntry]:
        """The versions, least recently used first."""
        return [
            BudgetEntry(name, self._ticks.get(name, 0), self._entries[name].checkpoint.extents)
            for name in self._oldest_first()
        ]

    def pack(self) -> None:
        """Encode what is stored losslessly and may be stored with loss, if that saves memory.

        It does not where another version refers to the same rows and may not lose any.
        """
        newest_first = self._oldest_first()[::-1]
        chosen = [self._entries[version] for version in newest_first]
        if not any(entry.pack for entry in chosen):
            return
        anew = packed_together([(entry.checkpoint, entry.pack) for entry in chosen])
        if live_bytes(used_rows(each.extents for each in anew)) >= live_bytes(self._used):
            return
        self._change(dict(zip(newest_first, [_Entry(each, None) for each in anew], strict=True)))
        self.compact()

    def compact(self) -> None:
        """Copy the used rows of payloads together that have others."""
        self._repack({payload for payload, used in self._used.items() if not used.all()})

    def _repack(self, payloads: set[Payload]) -> None:
        if not payloads:
            return
        newest_first = self._oldest_first()[::-1]
        entries = dict(self._entries)
        extents = [entries[version].checkpoint.extents for version in newest_first]
        for version, anew in zip(newest_first, repacked(extents, payloads), strict=True):
            entry = entries[version]
            moved = replace(entry.checkpoint, extents=anew)
            entries[version] = replace(entry, checkpoint=moved)
        self._change(entries)

    def _oldest_first(self) -> list[str]:
        """Names of the versions, least recently used first."""
        return sorted(self._entries, key=lambda name: self._ticks.get(name, 0))

    def _change(self, entries: dict[str, _Entry]) -> None:
        """Replace the versions. The budget's lock is held."""
        self._entries = entries
        self._ticks = {name: self._ticks.get(name, 0) for name in entries}
        names = tuple(entries)
        if self._index[1] != names:
            ids = [entries[name].checkpoint.token_ids for name in names]
            self._index = OverlapIndex(ids), names
        newest_first = self._oldest_first()[::-1]
        self._used = used_rows(entries[name].checkpoint.extents for name in newest_first)


SHORTEST = 8
"""Tokens of the grams that are compared; shorter runs are found only at the beginning."""
MAX_SEQUENCES = 32
"""Sequences that one index can hold."""

_FACTORS = np.random.default_rng(0).integers(1, 2**63, SHORTEST, dtype=np.uint64)


def _grams(token_ids: IntArray) -> npt.NDArray[np.uint64]:
    """Hash of the `SHORTEST` tokens from each position on, `[max(0, tokens - SHORTEST + 1)]`."""
    count = max(0, len(token_ids) - SHORTEST + 1)
    ids = token_ids.astype(np.uint64)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset, factor in enumerate(_FACTORS):
        hashes += ids[offset : offset + count] * factor  # modulo 2**64
    return hashes


class OverlapIndex:
    """Index of the token n-grams of up to `MAX_SEQUENCES` sequences. Immutable.

    Args:
        sequences: token ids, int64 `[tokens]` each.
    """

    def __init__(self, sequences: Sequence[IntArray]) -> None:
        if len(sequences) > MAX_SEQUENCES:
            raise ValueError(f"{len(sequences)} sequences: an index holds {MAX_SEQUENCES}")
        self._sequences = tuple(sequences)
        grams = [np.unique(_grams(ids)) for ids in sequences]
        bits = np.repeat(
            np.uint32(1) << np.arange(len(grams), dtype=np.uint32), [len(g) for g in grams]
        )
        every = np.concatenate([np.zeros(0, dtype=np.uint64), *grams])
        order = np.argsort(every, kind="stable")
        every, bits = every[order], bits[order]
        firsts = np.flatnonzero(np.diff(every, prepend=every[:1] ^ np.uint64(1)))
        self._grams = every[firsts]
        self._owners = np.bitwise_or.reduceat(bits, firsts) if len(firsts) else bits

    def bounds(self, token_ids: IntArray) -> list[int]:
        """Upper bounds on the tokens of `token_ids` that each sequence can be aligned with.

        Counted are the tokens in some gram that the sequence has too, and its common prefix. (Runs
        shorter than `SHORTEST` tokens elsewhere are not, nor worth restoring.)
        """
        covered = np.zeros(len(token_ids), dtype=np.uint32)
        grams = _grams(token_ids)
        if len(grams) and len(self._grams):
            places = np.searchsorted(self._grams, grams)
            places[places == len(self._grams)] = 0
            owners = np.where(self._grams[places] == grams, self._owners[places], np.uint32(0))
            for offset in range(SHORTEST):
                covered[offset : offset + len(owners)] |= owners
        bounds = []
        for bit, sequence in enumerate(self._sequences):
            prefix = common_prefix(sequence, token_ids)
            behind = covered[prefix:] & np.uint32(1 << bit)
            bounds.append(prefix + int(np.count_nonzero(behind)))
        return bounds
