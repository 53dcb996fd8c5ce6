"""Which stored version a context is recovered from."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from patchkv_agents.checkpoint import Checkpoint, CheckpointVersions
from patchkv_agents.checkpoint.block_map import BlockMap
from patchkv_agents.checkpoint.extents import extents_of
from patchkv_agents.ranges import ranges_of
from patchkv_agents.recovery import Edited, RecoveryPolicy, RowLabel, Window
from patchkv_agents.recovery.donors import SWITCH_ROWS, Donor, choose_donor, no_anchors

from ..checkpoint.rows import scaled_payload

PATCH = RecoveryPolicy("patch", Window(32, tail_tokens=16, block_size=32))


def tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 49152, count)


def stored(token_ids, origins=None) -> Checkpoint:
    count = len(token_ids)
    origins = np.zeros(count, np.int16) if origins is None else origins
    extents = extents_of(scaled_payload([count], [0]), [0])
    return Checkpoint(token_ids, origins, np.zeros(count, np.float32), extents)


def chosen(current, versions, token_ids, policy=PATCH):
    others = (
        (bound, Donor(name, versions.get(name)))
        for bound, name in versions.ranked(token_ids, exact=policy.is_exact)
    )
    return choose_donor(current, others, token_ids, policy)


@pytest.fixture
def lines():
    """Two branches behind a common beginning, and a version far from both."""
    base = tokens(1, 600)
    versions = CheckpointVersions()
    versions.put("left", stored(np.concatenate([base, tokens(2, 400)])))
    versions.put("right", stored(np.concatenate([base, tokens(3, 400)])))
    versions.put("other", stored(tokens(4, 1000)))
    return versions


@pytest.mark.parametrize("policy", [PATCH, RecoveryPolicy.exact()], ids=lambda p: p.name)
def test_the_version_that_leaves_least_to_compute_is_taken(lines, policy):
    here = Donor("other", lines.get("other"))
    back = lines.get("left").token_ids
    donor, plan = chosen(here, lines, np.append(back, [1, 2]), policy)
    assert donor.version == "left" and len(plan.rows) == 2
    donor, plan = chosen(here, lines, tokens(9, 50), policy)
    assert donor is here and len(plan.rows) == 50


def test_a_live_cache_is_left_only_for_a_real_gain(lines):
    left = lines.get("left").token_ids
    short = Donor("live", stored(left[: len(left) - SWITCH_ROWS + 1]), is_live=True)
    assert chosen(short, lines, left)[0] is short
    shorter = Donor("live", stored(left[: len(left) - SWITCH_ROWS - 2]), is_live=True)
    assert chosen(shorter, lines, left)[0].version == "left"


def test_among_equals_the_one_with_fewer_inexact_rows_is_taken(lines):
    ids = lines.get("left").token_ids
    quantised = Donor("here", stored(ids, np.full(len(ids), -3, np.int16)))
    donor, plan = chosen(quantised, lines, ids)
    assert donor.version == "left" and plan.is_exact
    exact = Donor("here", lines.get("left"))
    assert chosen(exact, lines, ids)[0] is exact


def test_a_donor_says_where_its_blocks_looked():
    """Block 10 alone looked at block 2, which is edited; no token has a score."""
    old = tokens(7, 640)
    mass = np.eye(20, dtype=np.float32)
    mass[10, 2] = mass[10, 10] = 0.5
    checkpoint = replace(stored(old), block_map=BlockMap(32, mass))
    new = old.copy()
    new[70:80] = tokens(8, 10)
    policy = PATCH.varied(rule=Edited(0.05), block_size=32)
    plan = Donor("old", checkpoint).plan(new, policy, no_anchors)
    assert ranges_of(plan.labels == RowLabel.ATTENTION) == ((320, 352),)


@pytest.mark.parametrize("policy", [PATCH, RecoveryPolicy.exact()], ids=lambda p: p.name)
def test_choosing_among_twenty_versions_takes_few_milliseconds(policy):
    """Twenty revisions of one context, and one more. Measured 2 to 4 ms at 8,000 tokens, alignment
    and plan of the chosen one among them; CPU time, so that a busy machine says nothing."""
    count = 8000
    base = tokens(5, count)
    versions = CheckpointVersions()
    revisions = []
    for number in range(21):
        revision = base.copy()
        at = count // 5 + number * count // 40
        revision[at : at + 64] = tokens(100 + number, 64)
        revisions.append(revision)
    for number, revision in enumerate(revisions[:20]):
        versions.put(str(number), stored(revision), repack=False)
    current = Donor("19", versions.get("19"))
    times = []
    for _ in range(9):
        started = time.thread_time()
        donor, plan = chosen(current, versions, revisions[20], policy)
        times.append((time.thread_time() - started) * 1e3)
    assert min(times) < 5
    assert donor.version in versions and plan.kept.any()


def test_messages_known_to_be_the_same_decide_which_copy_is_kept():
    """Of two equal passages one goes; by tokens alone it could be either."""
    copies = tokens(5, 64)
    old = np.concatenate([tokens(6, 50), copies, tokens(7, 20), copies, tokens(8, 20)])
    new = np.concatenate([old[:50], tokens(9, 3), copies, tokens(10, 30)])
    here = Donor("here", stored(old))
    for start in (50, 134):
        anchors = {"here": [((start, start + 64), (53, 117))]}
        _, plan = choose_donor(here, (), new, PATCH, lambda version, a=anchors: a[version])
        assert plan.aligned[53:117].tolist() == list(range(start, start + 64))
