"""Upper bounds on how many tokens of a context other sequences share, without an alignment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from patchkv_agents.ranges import IntArray

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


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Number of equal tokens at the beginning of two sequences."""
    size = min(len(a), len(b))
    unequal = np.flatnonzero(a[:size] != b[:size])
    return int(unequal[0]) if len(unequal) else size
