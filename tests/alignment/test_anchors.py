"""Anchors: they decide between copies, and never against the tokens."""

from __future__ import annotations

import numpy as np
import pytest

from patchkv_agents.alignment import Anchor, Run, align

from .reference import assert_holds, tokens

BLOCK = list(range(1000, 1100))
BODY = list(range(2000, 2050))


@pytest.mark.parametrize("copy", [0, 1])
def test_the_question_that_is_meant_keeps_its_state(copy: int) -> None:
    """The same question ends the old context and comes twice in the new one, each time behind other
    text: the anchor says which of the two it was, also against the common end."""
    question = list(range(600, 700))
    old = tokens(range(50), range(300, 340), question)
    new = tokens(range(50), range(400, 440), question, range(500, 540), question)
    at = (90, 230)[copy]
    alignment = align(old, new, anchors=[((90, 190), (at, at + 100))])
    assert alignment.runs == (Run(0, 0, 50), Run(90, at, 100))
    assert_holds(alignment, old, new, 16)


def test_the_copy_that_went_is_the_one_that_is_missing() -> None:
    """Ten equal blocks between changed lines: anchors say that the fourth went."""
    old_parts, new_parts, anchors = [-1], [-2], []
    for k in range(10):
        old_parts += [100 + k] * 20
        new_parts += [200 + k] * 20
        if k != 3:
            start = len(old_parts), len(new_parts)
            anchors.append(((start[0], start[0] + 100), (start[1], start[1] + 100)))
            new_parts += BLOCK
        old_parts += BLOCK
    old, new = tokens(old_parts), tokens(new_parts)
    alignment = align(old, new, anchors=anchors)
    assert alignment.runs != align(old, new).runs
    assert alignment.runs == tuple(Run(a[0], b[0], 100) for a, b in anchors)
    assert_holds(alignment, old, new, 16)


@pytest.mark.parametrize(
    "wrong",
    [
        ((50, 150), (40, 140)),
        ((50, 150), (50, 149)),
        ((0, 9999), (0, 9999)),
        ((9000, 9100), (9000, 9100)),
        ((-5, 10), (-5, 10)),
        ((20, 20), (20, 20)),
        ((30, 10), (30, 10)),
    ],
)
def test_anchors_that_are_wrong_are_without_effect(wrong: Anchor) -> None:
    old, new = tokens(-1, BODY, 7, BLOCK, 8), tokens(-2, BODY, 9, 9, BLOCK, 5)
    right = ((52, 152), (53, 153))
    assert align(old, new, anchors=[right, wrong]) == align(old, new)
    assert align(old, new, anchors=[wrong]) == align(old, new)


def test_anchors_in_any_order_and_in_part() -> None:
    old, new = tokens(-1, BODY, 7, BLOCK, 8), tokens(-2, BODY, 9, 9, BLOCK, 5)
    right = [((1, 51), (1, 51)), ((52, 102), (53, 103)), ((102, 152), (103, 153))]
    assert align(old, new, anchors=right[::-1]) == align(old, new)
    assert align(old, new, anchors=right[1:2]).runs == align(old, new).runs


def test_short_anchors_do_not_make_short_runs() -> None:
    """An anchor of 10 equal tokens amid unrelated text is as useless as any other run of 10."""
    rng = np.random.default_rng(0)
    a, b, c, d = rng.integers(5000, 9000, (4, 60))
    old, new = tokens(a.tolist(), range(10), b.tolist()), tokens(c.tolist(), range(10), d.tolist())
    assert align(old, new, anchors=[((60, 70), (60, 70))]).runs == ()
    twenty = tokens(a.tolist(), range(20), b.tolist()), tokens(c.tolist(), range(20), d.tolist())
    halves = [((60, 70), (60, 70)), ((70, 80), (70, 80))]
    assert align(*twenty, anchors=halves).runs == (Run(60, 60, 20),)


def test_anchors_that_cross_stay_with_the_larger_part() -> None:
    old, new = tokens(-1, BODY, BLOCK, -2), tokens(-3, BLOCK, BODY, -4)
    crossing = [((1, 51), (101, 151)), ((51, 151), (1, 101))]
    alignment = align(old, new, anchors=crossing)
    assert (alignment.runs, alignment.moves) == ((Run(51, 1, 100),), (Run(1, 101, 50),))


def test_a_long_block_that_crosses_short_anchors_wins() -> None:
    """A message of 300 tokens moved and changed in its middle, so that it is no anchor; two short
    ones which it crossed are. They hold 80 tokens, it holds 299."""
    rng = np.random.default_rng(1)
    long, short = rng.integers(0, 50_000, 300), rng.integers(50_000, 60_000, 80)
    changed = long.copy()
    changed[150] = -7
    old = tokens(-1, long.tolist(), -2, short.tolist(), -3)
    new = tokens(-4, short.tolist(), -5, changed.tolist(), -6)
    anchors = [((302, 342), (1, 41)), ((342, 382), (41, 81))]
    alignment = align(old, new, anchors=anchors)
    assert alignment == align(old, new)
    assert alignment.aligned_tokens == 299
