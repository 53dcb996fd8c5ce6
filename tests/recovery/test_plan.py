"""Which rows are kept, restored and computed, on plans small enough to write down."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkv_agents.alignment import Alignment, Hunk, Run, align
from patchkv_agents.engine.stopwatch import Stopwatch
from patchkv_agents.errors import InputError
from patchkv_agents.ranges import ranges_of
from patchkv_agents.recovery import (
    Blocks,
    Contiguous,
    Exact,
    RecoveryPlan,
    RecoveryPolicy,
    RecoveryReport,
    RowLabel,
    Tokens,
    Window,
)

# Old: 10 prefix, 4 replaced, 86 suffix. New: 10 prefix, 7 new, 86 suffix (103 tokens).
ONE_EDIT = Alignment(
    tokens_old=100,
    tokens_new=103,
    runs=(Run(0, 0, 10), Run(14, 17, 86)),
    hunks=(Hunk(10, 14, 10, 17),),
)


def policy(name="test", window_tokens=8, tail_tokens=4, block_size=4, **changes):
    """With the window's defaults of these tests; exact where there is no window."""
    if window_tokens is None:
        return RecoveryPolicy(name, Exact())
    return RecoveryPolicy(name, Window(window_tokens, tail_tokens, block_size, **changes))


WINDOW_AND_TAIL = policy()


def plan(alignment=ONE_EDIT, policy=None, origins=None, available=None, scores=None):
    tokens = alignment.tokens_old
    return (policy or WINDOW_AND_TAIL).method.plan(
        alignment,
        origins=np.zeros(tokens, np.int16) if origins is None else origins,
        available=np.ones(tokens, bool) if available is None else available,
        scores=np.zeros(tokens, np.float32) if scores is None else scores,
    )


def layout(plan):
    """The plan as `(label, start, stop)` in token order."""
    found = [
        (label.name, start, stop)
        for label in RowLabel
        for start, stop in ranges_of(plan.labels == label)
    ]
    return sorted(found, key=lambda entry: entry[1])


def test_window_and_tail_are_rounded_to_blocks_of_the_new_version():
    """The window 17 to 25 meets the blocks up to 28; the tail 99 to 103 those from 96."""
    assert layout(plan()) == [
        ("PREFIX", 0, 10),
        ("NEW", 10, 17),
        ("WINDOW", 17, 28),
        ("RESTORED", 28, 96),
        ("TAIL", 96, 103),
    ]
    found = plan()
    assert np.array_equal(found.source[28:96], np.arange(25, 93))
    assert found.recompute_ratio == (7 + 11 + 7) / 93
    assert found.repair_ratio == (11 + 7) / 86
    assert not found.is_exact


def test_block_size_one_repairs_token_by_token():
    assert layout(plan(policy=policy(block_size=1, window_tokens=3, tail_tokens=1))) == [
        ("PREFIX", 0, 10),
        ("NEW", 10, 17),
        ("WINDOW", 17, 20),
        ("RESTORED", 20, 102),
        ("TAIL", 102, 103),
    ]


def test_attention_takes_the_blocks_with_the_largest_score_outside_window_and_tail():
    scores = np.zeros(100, np.float32)
    scores[[5, 15, 98]] = 9  # prefix, window, tail: not candidates
    scores[37] = 3  # new position 40
    scores[57] = 2  # new position 60
    scores[77] = 1
    found = plan(policy=policy(rule=Blocks(0.08)), scores=scores)
    assert ranges_of(found.labels == RowLabel.ATTENTION) == ((40, 44), (60, 64))


def test_blocks_without_any_attention_are_not_chosen():
    found = plan(policy=policy(rule=Blocks(1.0)))
    assert found.count(RowLabel.ATTENTION) == 0


def test_an_exact_policy_recomputes_everything_after_the_prefix():
    assert layout(plan(policy=RecoveryPolicy.exact())) == [
        ("PREFIX", 0, 10),
        ("NEW", 10, 17),
        ("WINDOW", 17, 103),
    ]


def test_rows_that_exist_nowhere_are_new():
    available = np.ones(100, bool)
    available[5] = False
    available[50:60] = False
    found = plan(available=available)
    assert found.labels[5] == RowLabel.NEW
    assert (found.labels[53:63] == RowLabel.NEW).all()
    assert found.labels[6] == RowLabel.PREFIX


def test_stale_rows_before_the_edit_are_no_prefix_hits():
    origins = np.zeros(100, np.int16)
    origins[4:] = 2
    assert layout(plan(origins=origins))[:3] == [
        ("PREFIX", 0, 4),
        ("RESTORED", 4, 10),
        ("NEW", 10, 17),
    ]
    assert layout(plan(origins=origins, policy=RecoveryPolicy.exact()))[1][0] == "WINDOW"


def test_each_of_several_edits_has_a_window():
    alignment = Alignment(
        tokens_old=100,
        tokens_new=100,
        runs=(Run(0, 0, 20), Run(22, 22, 38), Run(62, 62, 38)),
        hunks=(Hunk(20, 22, 20, 22), Hunk(60, 62, 60, 62)),
    )
    found = plan(alignment, policy(block_size=1, window_tokens=5, tail_tokens=1))
    assert ranges_of(found.labels == RowLabel.WINDOW) == ((22, 27), (62, 67))


def test_a_plan_is_extended_by_rows_that_it_restores_and_no_others():
    first = plan()  # window 17 to 28, tail 96 to 103
    rows = np.zeros(103, bool)
    rows[5:40] = True
    found = first.extended(rows, RowLabel.ATTENTION)
    assert ranges_of(found.labels == RowLabel.ATTENTION) == ((28, 40),)
    changed = found.labels != first.labels
    assert ranges_of(changed) == ((28, 40),)
    assert first.count(RowLabel.ATTENTION) == 0


def test_a_report_counts_every_label():
    labels = np.array(RowLabel, np.int8).repeat(np.arange(len(RowLabel)) + 1)
    report = RecoveryReport.of_plan(
        RecoveryPlan(labels, np.arange(len(labels)), 1),
        policy="test",
        fallback_reason=None,
        resumed_from=None,
        restored_formats={},
        payload_bytes=0,
        **Stopwatch().report(),
    )
    counts = {label: getattr(report, label.name.lower()) for label in RowLabel}
    assert counts == {label: label + 1 for label in RowLabel}
    assert sum(counts.values()) == report.tokens


def test_blocks_that_moved_are_new():
    """Their old state exists, and is far from what it would be at the new place."""
    block, rest = list(range(1000, 1050)), list(range(2000, 2300))
    alignment = align([*range(20), *block, *rest], [*range(20), *rest, *block, 5])
    assert alignment.moves == (Run(20, 320, 50),)
    found = plan(alignment)
    assert layout(found)[-1] == ("NEW", 320, 371)
    assert (found.source[320:] == -1).all()


def test_repair_ratio_counts_the_suffix_only():
    """Stale rows in front of a late edit, recomputed by an exact policy, made it exceed 1."""
    origins = np.zeros(100, np.int16)
    origins[4:] = 2
    late = Alignment(100, 101, (Run(0, 0, 90), Run(92, 93, 8)), (Hunk(90, 92, 90, 93),))
    found = plan(late, RecoveryPolicy.exact(), origins=origins)
    assert found.repair_ratio == 1 and found.recompute_ratio == 1
    assert found.count(RowLabel.WINDOW) == 86 + 8


def test_ratios_without_a_suffix():
    found = plan(align(np.arange(50), np.arange(60)))
    assert found.repair_ratio == 0 and found.recompute_ratio == 1
    assert layout(found) == [("PREFIX", 0, 50), ("NEW", 50, 60)]


@given(
    old=st.lists(st.integers(0, 3), max_size=80),
    new=st.lists(st.integers(0, 3), min_size=1, max_size=80),
    window=st.none() | st.integers(0, 20),
    fraction=st.sampled_from([0.0, 0.1, 1.0]),
    tail=st.integers(1, 20),
    block=st.sampled_from([1, 3, 32]),
    seed=st.integers(0, 9),
)
def test_every_plan_keeps_its_promises(old, new, window, fraction, tail, block, seed):
    rng = np.random.default_rng(seed)
    old, new = np.array(old, np.int64), np.array(new, np.int64)
    first_stale = rng.integers(0, len(old) + 1)
    origins = np.where(np.arange(len(old)) < first_stale, 0, 1).astype(np.int16)
    available = rng.random(len(old)) < 0.9
    chosen = policy(
        window_tokens=window,
        rule=Blocks(fraction),
        tail_tokens=tail,
        block_size=block,
    )
    found = chosen.method.plan(
        align(old, new, min_run=2),
        origins=origins,
        available=available,
        scores=rng.random(len(old)).astype(np.float32),
    )
    kept = found.kept
    assert not kept[-1]  # the last token gives the logits
    assert ((found.source >= 0) == kept).all()
    source = found.source[kept]
    assert (old[source] == new[kept]).all() and available[source].all()
    prefix = found.labels == RowLabel.PREFIX
    assert (origins[found.source[prefix]] == 0).all()
    assert (found.source[prefix] == np.flatnonzero(prefix)).all()
    assert sum(found.count(label) for label in RowLabel) == len(new)
    after = found.origins(origins)
    restored = found.labels == RowLabel.RESTORED
    first = int(np.argmax(restored)) if restored.any() else len(new)
    assert not after[:first].any() and (after[first:] > 0).all()
    if window is None:
        assert found.is_exact


@pytest.mark.parametrize(
    "wrong",
    [
        {"window_tokens": -1},
        {"max_repaired": 1.5},
        {"max_repaired": float("nan")},
        {"tail_tokens": 0},
        {"block_size": 0},
        {"name": "exact"},
    ],
)
def test_a_policy_out_of_range_is_refused(wrong):
    with pytest.raises(InputError, match="use|needed|choose"):
        policy(**wrong)


def test_a_tail_of_one_token_is_not_grown_to_a_block():
    assert layout(plan(policy=policy(tail_tokens=1)))[-2:] == [
        ("RESTORED", 28, 102),
        ("TAIL", 102, 103),
    ]


def scores_at(*old):
    scores = np.zeros(100, np.float32)
    scores[list(old)] = np.arange(len(old), 0, -1)
    return scores


def test_published_selection_takes_tokens_and_then_rounds_them():
    """4 % of 86 tokens are 4: those at old 40, 60, 80 and 86 are new 43, 63, 83 and 89, each in a
    block of its own. By blocks there would be ceil(86 * 0.04 / 4) = 1."""
    scores = scores_at(40, 60, 80, 86, 90)
    published = policy(rule=Tokens(0.04))
    found = plan(policy=published, scores=scores)
    assert ranges_of(found.labels == RowLabel.ATTENTION) == (
        (40, 44),
        (60, 64),
        (80, 84),
        (88, 92),
    )
    found = plan(policy=policy(rule=Blocks(0.04)), scores=scores)
    assert ranges_of(found.labels == RowLabel.ATTENTION) == ((40, 44),)


def test_published_selection_leaves_out_tokens_without_a_score_and_those_computed_anyway():
    """Old 15 lies in the window, 99 in the tail."""
    published = policy(rule=Tokens(0.1))
    found = plan(policy=published, scores=scores_at(15, 99, 50))
    assert ranges_of(found.labels == RowLabel.ATTENTION) == ((52, 56),)


TWO_EDITS = Alignment(
    tokens_old=400,
    tokens_new=403,
    runs=(Run(0, 0, 50), Run(54, 57, 143), Run(210, 213, 190)),
    hunks=(Hunk(50, 54, 50, 57), Hunk(197, 210, 200, 213)),
)


@given(
    window=st.integers(0, 60),
    tail=st.integers(1, 40),
    fraction=st.floats(0, 0.2),
    block=st.sampled_from([1, 4, 32]),
    alignment=st.sampled_from([ONE_EDIT, TWO_EDITS]),
    seed=st.integers(0, 10),
)
def test_a_contiguous_window_has_the_budget_of_the_default(
    window, tail, fraction, block, alignment, seed
):
    """To the row, and with the nearest blocks behind the edits: none nearer is restored.

    It once had up to a block more, and the last token on top.
    """
    changes = {
        "window_tokens": window,
        "tail_tokens": tail,
        "block_size": block,
    }
    scores = np.random.default_rng(seed).random(alignment.tokens_old).astype(np.float32)
    default = plan(alignment, policy(**changes, rule=Blocks(fraction)), scores=scores)
    found = plan(alignment, policy(**changes, rule=Contiguous(fraction)), scores=scores)
    assert not (found.labels == RowLabel.ATTENTION).any()
    assert len(found.rows) == len(default.rows)
    assert found.count(RowLabel.TAIL) <= 1
    suffix, nearest = found.suffix, {True: [], False: []}
    for start in range(0, alignment.tokens_new, block):
        own = start + np.flatnonzero(suffix[:-1][start : start + block])
        if len(own):
            distances = [p - h.new_stop for p in own for h in alignment.hunks if p >= h.new_stop]
            nearest[bool((found.labels[own] == RowLabel.WINDOW).all())].append(min(distances))
    assert max(nearest[True], default=0) <= min(nearest[False], default=10**6)
