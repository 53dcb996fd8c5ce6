"""Alignment of two token sequences: the shapes of agent edits, empty and wrong input."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from patchkv_agents.alignment import Alignment, Hunk, Run, align
from patchkv_agents.errors import InputError

from .reference import assert_holds, random_edits, tokens


def test_replaced_middle_keeps_prefix_and_suffix() -> None:
    old = tokens(range(100), [900] * 30, range(200, 400))
    new = tokens(range(100), [901] * 50, range(200, 400))
    alignment = align(old, new)
    assert alignment.runs == (Run(0, 0, 100), Run(130, 150, 200))
    assert alignment.hunks == (Hunk(100, 130, 100, 150),)
    assert (alignment.prefix, alignment.recoverable_tokens) == (100, 200)
    assert alignment.runs[1].shift == 20
    assert alignment.position_map()[[0, 99, 100, 149, 150, 349]].tolist() == [
        0,
        99,
        -1,
        -1,
        130,
        329,
    ]


def test_several_edits_in_one_alignment() -> None:
    old = tokens(range(50), [900] * 5, range(100, 150), range(300, 320), range(200, 250))
    new = tokens(range(50), [901] * 7, range(100, 150), range(200, 250), [902])
    alignment = align(old, new)
    assert alignment.runs == (Run(0, 0, 50), Run(55, 57, 50), Run(125, 107, 50))
    assert alignment.hunks == (
        Hunk(50, 55, 50, 57),
        Hunk(105, 125, 107, 107),
        Hunk(175, 175, 157, 158),
    )
    assert_holds(alignment, old, new, 16)


def test_appended_turn_is_one_hunk_at_the_end() -> None:
    """The generation prompt ends old and new alike.

    Taken as a common suffix it would be torn from the turn it follows and moved over the reply.
    """
    prompt = [7, 8, 9]
    turn = tokens(range(100, 160), prompt)
    old = tokens(range(50), [900] * 20, turn.tolist())
    new = tokens(range(50), [901] * 20, turn.tolist(), range(500, 540), prompt)
    alignment = align(old, new)
    assert alignment.runs == (Run(0, 0, 50), Run(70, 70, 63))
    assert alignment.hunks[-1] == Hunk(133, 133, 133, 176)


def test_repeated_question_stays_with_its_own_turn() -> None:
    """Same as above with a last turn too long for the zone where suffix and runs compete."""
    question = list(range(600, 700))
    old = tokens(range(50), [900] * 20, range(100, 160), question)
    new = tokens(range(50), [901] * 20, range(100, 160), question, range(500, 540), question)
    assert align(old, new).runs == (Run(0, 0, 50), Run(70, 70, 160))


@pytest.mark.parametrize("deleted", range(4))
def test_one_of_four_copies_deleted(deleted: int) -> None:
    """Each copy stands between unique lines: exactly the right one must be missing."""
    block = list(range(1000, 1130))
    lines = [range(20 * i, 20 * i + 20) for i in range(5)]
    old_parts: list[int] = [-1]
    new_parts: list[int] = [-2]
    gap = (0, 0)
    for i in range(4):
        old_parts += [*lines[i], *block]
        new_parts += [*lines[i]]
        if i == deleted:
            gap = (len(old_parts) - len(block), len(old_parts))
        else:
            new_parts += block
    old, new = tokens(old_parts, lines[4], -3), tokens(new_parts, lines[4], -4)
    alignment = align(old, new)
    assert_holds(alignment, old, new, 16)
    assert alignment.hunks[1:-1] == (Hunk(gap[0], gap[1], gap[0], gap[0]),)


def test_adjacent_copies_lose_nothing() -> None:
    """Of copies back to back, which one went cannot be told; all others must be found."""
    block = list(range(1000, 1130))
    old = tokens(-1, range(30), block, range(40, 70), block, block, range(80, 200), block, -3)
    new = tokens(-2, range(30), block, range(40, 70), block, range(80, 200), block, -4)
    alignment = align(old, new)
    assert alignment.aligned_tokens == len(new) - 2
    assert len(alignment.runs) == 2


def test_long_repeated_text_outweighs_a_short_unique_anchor() -> None:
    """Patience diff matches the unique lines first and gives up 2,000 repeated tokens for 20."""
    block = list(range(1000, 2000))
    old, new = tokens(range(20), block, block), tokens(block, block, range(20))
    assert align(old, new).runs == (Run(20, 0, 2000),)


def test_equal_scraps_between_unrelated_texts_are_not_runs() -> None:
    """Summaries share words with what they replace: runs under min_run are chance."""
    rng = np.random.default_rng(0)
    old_middle, new_middle = rng.integers(1000, 2000, 600), rng.integers(3000, 4000, 600)
    for at in range(0, 600, 40):
        new_middle[at : at + 15] = old_middle[at : at + 15]
    old = np.concatenate([np.arange(50), [1], old_middle, [2], np.arange(100, 200)])
    new = np.concatenate([np.arange(50), [3], new_middle, [4], np.arange(100, 200)])
    assert align(old, new).runs == (Run(0, 0, 50), Run(652, 652, 100))
    assert len(align(old, new, min_run=15).runs) == 2 + 15


def test_short_prefix_and_suffix_count() -> None:
    alignment = align([1, 2, 50, 51, 3], [1, 2, 60, 3])
    assert alignment.runs == (Run(0, 0, 2), Run(4, 3, 1))
    assert (alignment.prefix, alignment.recoverable_tokens) == (2, 1)


def test_no_prefix() -> None:
    alignment = align(tokens(5, range(100, 200)), tokens(6, 7, range(100, 200)))
    assert alignment.runs == (Run(1, 2, 100),)
    assert (alignment.prefix, alignment.recoverable_tokens) == (0, 100)


def test_run_that_overlaps_the_suffix_is_not_lost() -> None:
    """A run of exactly min_run tokens shares 10 of them with a common suffix of 12.

    Cutting off the whole suffix first leaves 6 of the 16, too few, and loses them.
    """
    shared = list(range(100, 110))
    old = tokens(-1, range(6), shared, 900, 901)
    new = tokens(-2, range(6), shared, range(300, 340), shared, 900, 901)
    assert align(old, new).aligned_tokens == 18


# --- empty, equal, wrong input ---------------------------------------------------------------


def test_empty_sequences() -> None:
    assert align([], []) == Alignment(0, 0, (), ())
    assert align([], [1, 2]) == Alignment(0, 2, (), (Hunk(0, 0, 0, 2),))
    assert align([1, 2], []) == Alignment(2, 0, (), (Hunk(0, 2, 0, 0),))
    assert align([], [1, 2]).position_map().tolist() == [-1, -1]
    assert align([], []).position_map().shape == (0,)


def test_equal_sequences_are_one_run() -> None:
    alignment = align(range(10), list(range(10)))
    assert alignment == Alignment(10, 10, (Run(0, 0, 10),), ())
    assert (alignment.prefix, alignment.recoverable_tokens) == (10, 0)


def test_arguments_are_not_changed_and_small_dtypes_work() -> None:
    rng = np.random.default_rng(3)
    old = rng.integers(0, 100, 500).astype(np.uint16)
    new = random_edits(old.astype(np.int64), 5, rng, vocabulary=100).astype(np.int32)
    before = old.copy(), new.copy()
    assert_holds(align(old, new), old.astype(np.int64), new.astype(np.int64), 16)
    assert np.array_equal(old, before[0]) and np.array_equal(new, before[1])
    old.flags.writeable = new.flags.writeable = False
    align(old, new)


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((2, 3), dtype=np.int64),
        np.int64(3),
        [1.0, 2.0],
        np.array([True, False]),
        ["a", "b"],
        [[1, 2], [3]],
        [None, 1],
        "text",
        None,
    ],
    ids=["2-d", "scalar", "floats", "booleans", "strings", "ragged", "none", "str", "None"],
)
def test_wrong_sequences_are_refused(bad: object) -> None:
    with pytest.raises(InputError, match="old_ids"):
        align(bad, [1, 2, 3])
    with pytest.raises(InputError, match="new_ids"):
        align([1, 2, 3], bad)


@pytest.mark.parametrize("bad", [0, -1, 2.5, "16", None])
def test_wrong_min_run_is_refused(bad: object) -> None:
    with pytest.raises(InputError, match="min_run"):
        align([1], [1], min_run=bad)  # type: ignore[arg-type]


def test_the_reference_notices_every_kind_of_wrong_alignment() -> None:
    old, new = np.arange(100), np.concatenate([np.arange(40), [7, 7], np.arange(50, 100)])
    good = align(old, new)
    assert_holds(good, old, new, 16)
    first, second = good.runs
    wrong = [
        Alignment(99, good.tokens_new, good.runs, good.hunks),
        Alignment(100, good.tokens_new, good.runs, ()),
        _with_runs(good, Run(0, 0, 41), second),
        _with_runs(good, Run(0, 0, 39), second),
        _with_runs(good, first, Run(51, 43, 49)),
        _with_runs(good, Run(0, 0, 0), second),
        _with_runs(good, second, first),
        _with_runs(good, first, first, second),
        replace(good, moves=(Run(40, 40, 1),)),
        replace(good, moves=(Run(0, 0, 1),)),
    ]
    for alignment in wrong:
        with pytest.raises(AssertionError):
            assert_holds(alignment, old, new, 16)


def _with_runs(alignment: Alignment, *runs: Run) -> Alignment:
    hunks, old_at, new_at = [], 0, 0
    for run in (*runs, Run(alignment.tokens_old, alignment.tokens_new, 0)):
        if (old_at, new_at) != (run.old_start, run.new_start):
            hunks.append(Hunk(old_at, run.old_start, new_at, run.new_start))
        old_at, new_at = run.old_stop, run.new_stop
    return Alignment(alignment.tokens_old, alignment.tokens_new, runs, tuple(hunks))
