"""How much `align` looks at: a bounded number of passes over the sequences, also the worst ones.

`patchkv bench plan` measures times.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from patchkv_agents.alignment import Alignment, Run, align, matching, segments

from .reference import Ints, assert_holds, random_edits, tokens

Counted = Callable[..., tuple[Alignment, int]]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """`align`, with the tokens that it searched for segments, those of small gaps rounded up."""
    find_segments, searched = segments.find_segments, []

    def find_counted(old: Ints, new: Ints, k: int, limit: int) -> segments.Segments:
        searched.append(len(old) + len(new) + 384)
        return find_segments(old, new, k, limit)

    def align_counted(old: Ints, new: Ints, **options: int) -> tuple[Alignment, int]:
        searched.clear()
        alignment = align(old, new, **options)
        return alignment, sum(searched)

    monkeypatch.setattr(matching, "find_segments", find_counted)
    return align_counted


@pytest.mark.parametrize(
    ("length", "edits"), [(10_000, 1), (100_000, 1), (10_000, 20), (100_000, 20)]
)
def test_small_edits_take_one_pass_over_what_is_between_them(
    counted: Counted, length: int, edits: int
) -> None:
    rng = np.random.default_rng(length + edits)
    old = rng.zipf(1.3, length) % 49152
    new = old.copy()
    first = length // 5
    last = first
    for at in range(first, length, max(1, length * 4 // 5 // edits)):
        last = at
        new[at : at + 64] = rng.integers(0, 49152, len(new[at : at + 64]))
    alignment, searched = counted(old, new)
    assert_holds(alignment, old, new, 16)
    assert alignment.aligned_tokens >= length - edits * 64
    assert searched <= 2 * (last - first + 64 + 2 * 16) + 384


def _worst_cases() -> dict[str, tuple[Ints, Ints, float]]:
    """Old, new, and the share of the shorter one that must be aligned at least."""
    rng = np.random.default_rng(0)
    n = 100_000
    zeros = [0] * n
    rows = rng.integers(0, 49152, (100, 100))
    old_rows, new_rows = (rows[rng.integers(0, 100, 1000)].ravel() for _ in range(2))
    sparse, other = ((rng.random(n) < 0.01).astype(np.int64) for _ in range(2))
    cases: dict[str, tuple[Ints, Ints, float]] = {
        "unrelated": (rng.integers(0, 49152, n), rng.integers(0, 49152, n), 0.0),
        "reversed": (np.arange(n), np.arange(n)[::-1], 0.0),
        "zeros": (tokens(zeros), tokens(zeros[1000:]), 1.0),
        "zeros between other ends": (tokens(1, zeros, 2), tokens(3, zeros[1000:], 4), 0.9999),
        "mostly zeros, unrelated": (sparse, other, 0.85),
        "two symbols, unrelated": (rng.integers(0, 2, n), rng.integers(0, 2, n), 0.055),
        "100 blocks in random order": (old_rows, new_rows, 0.15),
    }
    for period, edits, share in [
        (2, 20, 0.99),
        (7, 20, 0.98),
        (1000, 20, 0.99),
        (7, 200, 0.88),
        (1000, 200, 0.9),
    ]:
        old = np.tile(rng.integers(0, 49152, period), n // period)
        new = random_edits(old, edits, rng, vocabulary=49152)
        ends = tokens(-1, old.tolist(), -2), tokens(-3, new.tolist(), -4)
        cases[f"period {period}, {edits} edits"] = *ends, share
    return cases


WORST_CASES = _worst_cases()


@pytest.mark.parametrize("case", WORST_CASES)
def test_worst_cases_stay_bounded(counted: Counted, case: str) -> None:
    """100,000 tokens each."""
    old, new, share = WORST_CASES[case]
    alignment, searched = counted(old, new)
    assert_holds(alignment, old, new, 16)
    assert alignment.aligned_tokens >= share * min(len(old), len(new))
    assert searched <= 17 * (len(old) + len(new))


def test_number_of_passes_is_bounded(counted: Counted) -> None:
    """With min_run 1 unrelated texts leave thousands of gaps; not all of them are searched."""
    rng = np.random.default_rng(0)
    old, new = rng.zipf(1.3, 30_000) % 49152, rng.zipf(1.3, 30_000) % 49152
    alignment, searched = counted(old, new, min_run=1)
    assert_holds(alignment, old, new, 1)
    assert 2 * 60_000 < searched < 17 * 60_000


def test_all_zeros_lose_nothing() -> None:
    alignment = align(np.zeros(100_000, dtype=int), np.zeros(99_000, dtype=int))
    assert alignment.runs == (Run(0, 0, 99_000),)
