"""Which rows behind an edit are computed again, on contexts small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkv_agents.alignment import Alignment, Hunk, Run
from patchkv_agents.checkpoint.block_map import BlockMap
from patchkv_agents.ranges import ranges_of
from patchkv_agents.recovery import (
    Blocks,
    Combined,
    Contiguous,
    Edited,
    Exact,
    Question,
    RecoveryPolicy,
    RowLabel,
    Tokens,
    Window,
    WindowModel,
)

# 200 tokens before and after; 4 replaced at 20, 2 at 60 and 10 at 100, by as many.
THREE_EDITS = Alignment(
    200,
    200,
    (Run(0, 0, 20), Run(24, 24, 36), Run(62, 62, 38), Run(110, 110, 90)),
    (Hunk(20, 24, 20, 24), Hunk(60, 62, 60, 62), Hunk(100, 110, 100, 110)),
)
SUFFIX = 36 + 38 + 90


def policy(name="test", window_tokens=8, tail_tokens=4, block_size=4, **changes):
    """With the window's defaults of these tests; exact where there is no window."""
    if window_tokens is None:
        return RecoveryPolicy(name, Exact())
    return RecoveryPolicy(name, Window(window_tokens, tail_tokens, block_size, **changes))


def plan(policy, alignment=THREE_EDITS, scores=None, origins=None, block_map=None):
    tokens = alignment.tokens_old
    return policy.method.plan(
        alignment,
        origins=np.zeros(tokens, np.int16) if origins is None else origins,
        available=np.ones(tokens, bool),
        scores=np.zeros(tokens, np.float32) if scores is None else scores,
        block_map=block_map,
    )


def late_rows(plan, policy, scores):
    """What a question chooses once its attention is known."""
    method = policy.method
    return method.rule.late_rows(plan, scores, block_size=method.block_size, room=method.room(plan))


def rows(plan, label):
    return ranges_of(plan.labels == label)


def scores_at(*old, tokens=200):
    """The first the largest."""
    scores = np.zeros(tokens, np.float32)
    scores[list(old)] = np.arange(len(old), 0, -1)
    return scores


# Windows of a predicted length


def of_new_tokens(per_token):
    """log1p(length) = per_token * log1p(new): the length is `new` where per_token is 1."""
    return WindowModel(0.0, (0.0, per_token, 0.0, 0.0, 0.0, 0.0))


def test_a_window_is_as_long_as_the_model_says_of_its_own_edit():
    """As long as the edits: 4, 2 and 10 tokens. In blocks of 1 there is no rounding."""
    found = plan(policy(window_tokens=0, window_model=of_new_tokens(1), block_size=1))
    assert rows(found, RowLabel.WINDOW) == ((24, 28), (62, 64), (110, 120))


def test_a_window_is_never_shorter_than_window_tokens():
    found = plan(policy(window_tokens=3, window_model=of_new_tokens(1), block_size=1))
    assert rows(found, RowLabel.WINDOW) == ((24, 28), (62, 65), (110, 120))


def test_a_window_ends_at_the_next_edit():
    """A token belongs to the nearest edit in front of it, however long the earlier window was."""
    alignment = Alignment(
        100,
        140,
        (Run(0, 0, 20), Run(20, 60, 10), Run(31, 71, 69)),
        (Hunk(20, 20, 20, 60), Hunk(30, 31, 70, 71)),
    )
    model = of_new_tokens(1)
    found = plan(policy(window_tokens=0, window_model=model, block_size=1), alignment)
    assert rows(found, RowLabel.WINDOW) == ((60, 70), (71, 72))


def test_the_suffix_of_an_edit_is_what_is_aligned_behind_it():
    """log1p(length) = log1p(suffix) - log(2): behind the edits 164, 128 and 90 tokens."""
    half = WindowModel(-np.log(2), (0.0, 0.0, 1.0, 0.0, 0.0, 0.0))
    found = plan(policy(window_tokens=0, window_model=half, block_size=1))
    lengths = [np.ceil((aligned + 1) / 2 - 1) for aligned in (164, 128, 90)]
    assert lengths == [82, 64, 45]
    assert rows(found, RowLabel.WINDOW) == ((24, 60), (62, 100), (110, 155))


# The limit on the share that is recomputed


def test_under_a_limit_windows_keep_the_blocks_nearest_to_all_edits():
    """Of 164 tokens 16 may be computed. The tail has 4. Blocks behind the edits, nearest first:
    24 to 28 (4 tokens at distance 0), 62 to 64 (2), 110 to 112 (2), then 64 to 68 and 112 to 116
    (4 each, distance 2); the next would pass the limit."""
    found = plan(policy(window_tokens=20, max_repaired=0.1))
    assert rows(found, RowLabel.WINDOW) == ((24, 28), (62, 68), (110, 112))
    assert rows(found, RowLabel.TAIL) == ((196, 200),)


def test_a_limit_that_nothing_reaches_changes_nothing():
    unlimited = plan(policy(rule=Blocks(0.05)), scores=scores_at(40, 90, 150))
    limited = plan(policy(rule=Blocks(0.05), max_repaired=0.5), scores=scores_at(40, 90, 150))
    assert np.array_equal(limited.labels, unlimited.labels)


def test_windows_leave_room_for_the_attention_blocks():
    """Of 16 rows, the tail takes 4 and two attention blocks 8; one window block of 4 is left.
    Old 26 and 64 lie in windows that are cut, and 64 is a candidate then."""
    limited = policy(window_tokens=20, rule=Blocks(0.03), max_repaired=0.1)
    found = plan(limited, scores=scores_at(26, 64, 150, 90))
    assert rows(found, RowLabel.WINDOW) == ((24, 28),)
    assert rows(found, RowLabel.ATTENTION) == ((64, 68), (148, 152))


@pytest.mark.parametrize("selection", [Blocks, Edited, Combined])
def test_windows_leave_no_room_for_blocks_that_nobody_looks_at(selection):
    """Without scores, and with an empty map, nothing is chosen for its attention."""
    given = {"window_tokens": 64, "max_repaired": 0.2, "block_size": 1}
    alone = plan(policy(**given))
    unknown = plan(
        policy(**given, rule=selection(0.1)),
        block_map=BlockMap.unknown(200, 4),
    )
    assert unknown.count(RowLabel.ATTENTION) == 0
    assert unknown.count(RowLabel.WINDOW) == alone.count(RowLabel.WINDOW) > 0
    scored = plan(
        policy(**given, rule=selection(0.1)),
        scores=scores_at(190, 180, 150),
        block_map=BlockMap.unknown(200, 4),
    )
    assert scored.count(RowLabel.ATTENTION) == 3  # by scores, where the map knows nothing


def test_the_tail_is_computed_even_where_it_passes_the_limit_and_then_nothing_else_is():
    found = plan(policy(tail_tokens=30, rule=Blocks(0.1), max_repaired=0.1), scores=scores_at(40))
    assert rows(found, RowLabel.TAIL) == ((168, 200),)
    assert found.count(RowLabel.WINDOW) == found.count(RowLabel.ATTENTION) == 0


def test_a_limit_of_one_is_none():
    whole = policy(window_tokens=200, rule=Blocks(0.1), max_repaired=1.0)
    assert plan(whole).repair_ratio == 1.0


def test_scattered_tokens_keep_to_the_limit_too():
    """8 tokens in 8 blocks; 16 rows less 4 of the tail have room for three of them."""
    scattered = policy(
        window_tokens=0,
        rule=Tokens(0.05),
        max_repaired=0.1,
    )
    found = plan(scattered, scores=scores_at(32, 40, 48, 72, 80, 120, 140, 160, 180))
    assert rows(found, RowLabel.ATTENTION) == ((32, 36), (40, 44), (48, 52))


# Where the old blocks looked


def map_of(blocks, *given, size=10):
    """A map in which each block looks at itself, but for the shares `given`: (from, to, share)."""
    mass = np.eye(blocks, dtype=np.float32)
    for block, to, share in given:
        mass[block, to] += share
        mass[block, block] -= share
    return BlockMap(size, mass)


EDITED = policy(window_tokens=10, rule=Edited(0.06))
"""Three blocks of 4. Old blocks 2, 6 and 10 are edited; what is left of them lies in windows."""
LOOKS = map_of(20, (5, 2, 0.5), (9, 6, 0.2), (13, 10, 0.9), (15, 13, 0.4), (17, 16, 0.9))


def test_blocks_that_looked_at_the_edit_are_ranked_by_how_much():
    """Old 13 (130 to 140) gave 0.9, directly and through itself 0.99; 5 (50 to 60) 0.75. In blocks
    of 4, 128 to 132 and 136 to 140 have a part of old 13."""
    found = plan(EDITED, block_map=LOOKS, scores=scores_at(70, 80))
    assert rows(found, RowLabel.ATTENTION) == ((128, 140),)
    wider = policy(window_tokens=10, rule=Edited(0.13))
    found = plan(wider, block_map=LOOKS)
    assert rows(found, RowLabel.ATTENTION) == ((48, 60), (128, 140))


def test_mass_times_score_prefers_blocks_that_are_looked_at_too():
    """Scores 5 to 1, times masses 0, 0.36, 0.36, 0.75 and 0.99: 1.44 and 1.08, 1.5 and 0.99."""
    combined = policy(window_tokens=10, rule=Combined(0.06))
    found = plan(combined, block_map=LOOKS, scores=scores_at(82, 152, 95, 57, 135))
    assert rows(found, RowLabel.ATTENTION) == ((56, 60), (92, 96), (152, 156))


@pytest.mark.parametrize("selection", [Edited, Combined])
def test_without_a_map_blocks_are_chosen_by_their_scores(selection):
    scores = scores_at(40, 90, 150, 160)
    chosen = policy(rule=selection(0.06))
    found = plan(chosen, scores=scores)
    by_score = plan(policy(rule=Blocks(0.06)), scores=scores)
    assert np.array_equal(found.labels, by_score.labels)


# A question that is known only at resume


def test_a_question_gets_its_blocks_once_its_attention_is_known():
    """New 150 and 90 have most of it, of what is restored; 30 lies in a window, 198 in the tail."""
    asked = policy(rule=Question(0.03))
    first = plan(asked, scores=scores_at(40, 50))
    assert first.count(RowLabel.ATTENTION) == 0
    chosen = late_rows(first, asked, scores_at(30, 198, 150, 90, 40))
    assert ranges_of(chosen) == ((88, 92), (148, 152))
    assert rows(first.extended(chosen, RowLabel.ATTENTION), RowLabel.ATTENTION) == (
        (88, 92),
        (148, 152),
    )


def test_a_limit_holds_for_questions_and_for_what_is_added_later():
    asked = policy(
        window_tokens=20,
        rule=Question(0.03),
        max_repaired=0.1,
    )
    first = plan(asked)
    assert (first.count(RowLabel.WINDOW), first.count(RowLabel.TAIL)) == (4, 4)
    assert asked.method.room(first) == 8
    chosen = late_rows(first, asked, scores_at(150, 90, 40))
    assert asked.method.room(first.extended(chosen, RowLabel.ATTENTION)) == 0
    assert policy().method.room(first) == SUFFIX - 8


@given(
    window=st.integers(0, 40),
    model=st.sampled_from([None, of_new_tokens(1.5)]),
    fraction=st.floats(0, 0.2),
    tail=st.integers(1, 40),
    block=st.sampled_from([1, 4, 32]),
    share=st.none() | st.floats(0.01, 1),
    rule=st.sampled_from([Blocks, Tokens, Contiguous, Edited, Combined, Question]),
    seed=st.integers(0, 20),
)
def test_every_choice_keeps_to_its_limits(window, model, fraction, tail, block, share, rule, seed):
    rng = np.random.default_rng(seed)
    chosen = policy(
        window_tokens=window,
        window_model=model,
        rule=rule(fraction),
        tail_tokens=tail,
        block_size=block,
        max_repaired=share,
    )
    origins = np.where(np.arange(200) < seed, 0, rng.integers(0, 5, 200)).astype(np.int16)
    mass = np.tril(rng.random((20, 20)).astype(np.float32))
    found = plan(
        chosen,
        scores=rng.random(200).astype(np.float32),
        origins=origins,
        block_map=BlockMap(10, mass / mass.sum(1, keepdims=True)),
    )
    if rule is Question:
        rows = late_rows(found, chosen, rng.random(200).astype(np.float32))
        found = found.extended(rows, RowLabel.ATTENTION)
    kept = found.kept
    assert not kept[-1]
    assert sum(found.count(label) for label in RowLabel) == 200
    in_front = set(found.labels[:20].tolist())
    assert in_front <= {RowLabel.PREFIX, RowLabel.RESTORED}
    certain = np.arange(200) >= (200 - tail) // block * block
    limit = (1 if share is None else share) * SUFFIX
    assert (found.suffix & ~kept).sum() <= max(limit, (found.suffix & certain).sum())
