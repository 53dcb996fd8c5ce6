"""What `align` promises, on random edit scripts, against a slow reference, under collisions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from patchkv_agents.alignment import Run, align, matching, segments

from .reference import Ints, assert_holds, best_cover, random_edits, tokens


@st.composite
def edit_scripts(draw: st.DrawFn) -> tuple[Ints, Ints, int]:
    """An old sequence (some of it repeated), a new one made by a few edits, and min_run."""
    min_run = draw(st.integers(2, 8))
    vocabulary = draw(st.sampled_from([6, 30, 1000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    blocks = [rng.integers(0, vocabulary, rng.integers(1, 40)) for _ in range(5)]
    order = draw(st.lists(st.integers(0, 4), min_size=1, max_size=8))
    old = np.concatenate([blocks[i] for i in order]).astype(np.int64)
    edits = draw(st.integers(0, 6))
    size = draw(st.sampled_from([1, 5, 40]))
    return old, random_edits(old, edits, rng, vocabulary=vocabulary, size=size), min_run


@settings(max_examples=300, deadline=None)
@given(edit_scripts())
def test_random_edit_scripts_keep_98_percent(case: tuple[Ints, Ints, int]) -> None:
    old, new, min_run = case
    alignment = align(old, new, min_run=min_run)
    assert_holds(alignment, old, new, min_run)
    assert alignment.aligned_tokens >= 0.98 * best_cover(old, new, min_run, keep_prefix=True)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_two_sequences_keep_the_guarantees(data: st.DataObject) -> None:
    """Unrelated sequences over tiny vocabularies: everything repeats, nothing may break."""
    ids = st.integers(0, data.draw(st.integers(0, 3)))
    old = np.array(data.draw(st.lists(ids, max_size=60)), dtype=np.int64)
    new = np.array(data.draw(st.lists(ids, max_size=60)), dtype=np.int64)
    min_run = data.draw(st.integers(1, 20))
    assert_holds(align(old, new, min_run=min_run), old, new, min_run)


@pytest.mark.parametrize("edits", [1, 5, 20, 60])
@pytest.mark.parametrize("text", ["varied", "blocks", "lines"])
def test_long_edit_scripts_against_the_textbook_problem(text: str, edits: int) -> None:
    """3,000 tokens; the reference here knows nothing of our rule for prefix and suffix."""
    rng = np.random.default_rng(edits)
    if text == "varied":
        old = rng.zipf(1.3, 3000) % 49152
    else:
        blocks = rng.integers(0, 1000, (8, 50))
        rows = blocks[rng.integers(0, 8, 60)].copy()
        if text == "lines":  # as logs: the same few lines, with a number that changes
            rows[:, 20] = rng.integers(0, 50, 60)
        old = rows.ravel()
    new = random_edits(old, edits, rng, vocabulary=1000)
    alignment = align(old, new)
    assert_holds(alignment, old, new, 16)
    assert alignment.aligned_tokens >= 0.98 * best_cover(old, new, 16, keep_prefix=False)


def test_reference_on_cases_worked_out_by_hand() -> None:
    old, new = tokens(1, range(10, 20), 2), tokens(3, range(10, 20), 4)
    assert best_cover(old, new, 4, keep_prefix=False) == 10
    assert best_cover(old, new, 11, keep_prefix=False) == 0
    assert best_cover(tokens(1, 2, 9, 3), tokens(1, 2, 8, 3), 3, keep_prefix=False) == 0
    assert best_cover(tokens(1, 2, 9, 3), tokens(1, 2, 8, 3), 3, keep_prefix=True) == 3
    swapped = tokens(range(30, 35), range(10, 20)), tokens(range(10, 20), range(30, 35))
    assert best_cover(*swapped, 5, keep_prefix=True) == 10


def test_hash_collisions_never_make_a_false_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hash that sees only the first token of a k-gram nearly every match is false."""

    def first_token_only(ids: Ints, k: int) -> NDArray[np.uint64]:
        # spread over the high bits, which are the ones that survive packing
        return ids[: len(ids) - k + 1].astype(np.uint64) << np.uint64(32)

    monkeypatch.setattr(segments, "kgram_hashes", first_token_only)
    rng = np.random.default_rng(0)
    old = rng.integers(0, 20, 2000)
    new = random_edits(old, 10, rng, vocabulary=20)
    alignment = align(old, new)
    assert_holds(alignment, old, new, 16)
    assert alignment.prefix > 0


@pytest.mark.parametrize("k", [1, 2, 3, 7, 16, 31, 64])
def test_kgram_hashes_tell_kgrams_apart(k: int) -> None:
    rng = np.random.default_rng(k)
    ids = np.concatenate([rng.integers(0, 3, 300), rng.integers(-5, 2**40, 100), np.zeros(99)])
    ids = ids.astype(np.int64)
    hashes = segments.kgram_hashes(ids, k)
    kgrams = [ids[i : i + k].tobytes() for i in range(len(ids) - k + 1)]
    assert hashes.shape == (len(kgrams),)
    assert len(set(hashes.tolist())) == len(set(kgrams))
    assert len(set(zip(kgrams, hashes.tolist(), strict=True))) == len(set(kgrams))


def test_pairs_named_by_both_rank_pairings_count_once() -> None:
    """In 5,000 equal tokens front and back pairing agree: one whole segment, not 9,969 scraps."""
    zeros = np.zeros(5000, dtype=np.int64)
    found = segments.find_segments(zeros, zeros, 16, 100)
    assert not found.complete
    assert (found.old_start.tolist(), found.new_start.tolist()) == ([0], [0])
    assert found.length.tolist() == [5000]


def test_runs_that_are_too_short_are_grown() -> None:
    """The last pass makes any valid runs maximal, whatever the passes before it left."""
    old = tokens(1, range(10, 30), 2, range(40, 60), 3, range(70, 90), 4)
    new = tokens(5, range(10, 30), 6, range(40, 60), 7, range(70, 90), 8)
    scraps = [Run(3, 3, 2), Run(30, 30, 1), Run(58, 58, 4)]
    assert matching._tidy(old, new, scraps) == (Run(1, 1, 20), Run(22, 22, 20), Run(43, 43, 20))
