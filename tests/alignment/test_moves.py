"""Blocks that moved: found whole, in any number, and nothing that did not move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from patchkv_agents.alignment import Run, align

from .reference import assert_holds, tokens

A, B, C = range(1000, 1050), range(2000, 2300), range(3000, 3040)


@pytest.mark.parametrize("forwards", [True, False])
def test_block_that_crosses_a_longer_one_is_a_move(forwards: bool) -> None:
    sides = tokens(range(20), A, B, range(50, 90)), tokens(range(20), B, A, range(50, 90))
    old, new = sides if forwards else sides[::-1]
    alignment = align(old, new)
    at = (20, 320) if forwards else (320, 20)
    assert alignment.moves == (Run(*at, 50),)
    assert (alignment.moved_tokens, alignment.aligned_tokens) == (50, 360)
    assert (alignment.prefix, alignment.recoverable_tokens) == (20, 340)
    assert_holds(alignment, old, new, 16)


def test_moved_block_in_a_hunk_with_other_new_text() -> None:
    """As a reminder that ends another message now, with a word put before it."""
    old = tokens(range(20), A, B, 5)
    new = tokens(range(20), B, range(70, 80), A, 6)
    assert align(old, new).moves == (Run(20, 330, 50),)


def test_order_of_several_blocks_is_undone() -> None:
    """As a list of tools in another order: the heaviest chain stays, each other block moves."""
    blocks = [range(1000 * k, 1000 * k + 40 + k) for k in range(1, 8)]
    order = [4, 1, 6, 5, 0, 2, 3]
    old = tokens(range(20), *blocks, -1, -2)
    new = tokens(range(20), *(blocks[k] for k in order), -1, -3)
    alignment = align(old, new)
    assert_holds(alignment, old, new, 16)
    assert alignment.aligned_tokens + alignment.moved_tokens == len(new) - 2  # -1 and -3
    assert all(move.length >= 40 for move in alignment.moves)


def test_short_blocks_and_copies_are_no_moves() -> None:
    """What is still at its old place did not move, however often it comes again."""
    short = range(1000, 1031)
    assert align(tokens(short, B, 5), tokens(B, short, 6)).moves == ()
    assert align(tokens(A, B, 5), tokens(A, B, A, 6)).moves == ()
    (move,) = align(tokens(1, A, 2, A, B), tokens(3, B, A)).moves  # from either of its places
    assert (move.new_start, move.length) == (301, 50)


def test_one_old_block_moves_to_one_place_only() -> None:
    old, new = tokens(A, B, 5), tokens(B, A, 7, A, 6)
    alignment = align(old, new)
    assert len(alignment.moves) == 1
    assert_holds(alignment, old, new, 16)


def test_move_never_reaches_over_two_hunks() -> None:
    """Two halves come from two hunks that lie on both sides of what stays."""
    half, other = list(range(1000, 1025)), list(range(1025, 1050))
    old = tokens(1, half, B, other, 2)
    new = tokens(3, B, half, other, 4)
    alignment = align(old, new)
    assert alignment.moves == ()
    assert_holds(alignment, old, new, 16)


def test_json_values() -> None:
    alignment = align(tokens(range(20), A, B, 5), tokens(range(20), B, A, 6))
    assert alignment.to_dict() == {
        "tokens_old": 371,
        "tokens_new": 371,
        "prefix": 20,
        "runs": [[0, 0, 20], [70, 20, 300]],
        "moves": [[20, 320, 50]],
        "hunks": [{"old": [20, 70], "new": [20, 20]}, {"old": [370, 371], "new": [320, 371]}],
        "recoverable_tokens": 300,
    }


def test_the_reference_notices_wrong_moves() -> None:
    old, new = tokens(range(20), A, C, B, 5), tokens(range(20), B, C, A, 6)
    good = align(old, new)
    assert_holds(good, old, new, 16)
    assert good.moves == (Run(70, 320, 40), Run(20, 360, 50))
    first, second = good.moves
    for moves in [
        (second, first),
        (first, first),
        (replace(first, length=41), second),
        (replace(first, old_start=71), second),
        (Run(0, 0, 20),),
    ]:
        with pytest.raises(AssertionError):
            assert_holds(replace(good, moves=moves), old, new, 16)


def test_repeated_text_gives_disjoint_moves_in_bounded_time() -> None:
    """A log of few lines, shuffled: thousands of places where each line could come from."""
    rng = np.random.default_rng(0)
    lines = rng.integers(0, 1000, (12, 40))
    old, new = (lines[rng.integers(0, 12, 400)].ravel() for _ in range(2))
    alignment = align(old, new)
    assert_holds(alignment, old, new, 16)
    assert alignment.moved_tokens > 0
