"""Versions of one sequence side by side: going back, branching, memory, faults."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from patchkv_agents.backends.transformers.adapter import ModelAdapter
from patchkv_agents.backends.transformers.support import rope_of
from patchkv_agents.checkpoint import CheckpointVersions, MemoryBudget
from patchkv_agents.checkpoint import offload as offload_module
from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.checkpoint.stores.base import CheckpointLoad
from patchkv_agents.engine import sequence as sequence_module
from patchkv_agents.engine.sequence import KVSequence
from patchkv_agents.errors import CheckpointError
from patchkv_agents.recovery import RecoveryPolicy, RowLabel, Window, restore
from patchkv_kernels import PayloadFormat

from ..checkpoint.rows import stored_rows
from ..operations import count_calls
from .models import edited, full_logits, random_ids, sequence_of, tiny_model
from .test_sharing import run_all

EXACT = RecoveryPolicy.exact()
PATCH = RecoveryPolicy("patch", Window(40, tail_tokens=16, block_size=32))
BASE = random_ids(1, 500)
LEFT, RIGHT = (np.concatenate([BASE[:300], random_ids(seed, 200)]) for seed in (2, 3))


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(params=[False, True], ids=["inline", "worker"])
def sequence(model, request):
    with ThreadPoolExecutor(1) as worker:
        yield KVSequence(
            ModelAdapter(model), rope_of(model), worker=worker if request.param else None
        )


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_going_back_restores_the_version_exactly(model, sequence):
    """After an approximate edit, the old version is still what it was: one row to compute."""
    sequence.resume(BASE, EXACT, version="base")
    sequence.suspend()
    new = edited(BASE, [(120, 30, 41)])
    assert not sequence.resume(new, PATCH, version="new").plan.is_exact
    sequence.suspend()
    back = sequence.resume(BASE, PATCH, version="base again")
    assert back.plan.is_exact and len(back.plan.rows) == 1
    assert back.resumed_from == "base" and back.restored_formats == {"native": 499}
    close(back.logits, full_logits(model, BASE))
    sequence.suspend()
    assert sorted(sequence.versions) == ["base", "base again", "new"]


def test_a_live_version_that_is_left_is_stored_and_found_again(model, sequence):
    """Two branches, switched without a suspend in between."""
    sequence.resume(BASE, EXACT, version="base")
    sequence.suspend()
    sequence.resume(LEFT, EXACT, version="left")
    right = sequence.resume(RIGHT, EXACT, version="right")
    # The first 300 rows lay in the live cache; nothing else of `left` was stored.
    assert right.resumed_from == "left" and len(right.plan.rows) == 200
    base = sequence.resume(BASE, EXACT, version="base")
    assert base.resumed_from == "base" and len(base.plan.rows) == 1
    close(base.logits, full_logits(model, BASE))
    again = sequence.resume(RIGHT, EXACT, version="right")
    assert again.resumed_from == "right" and len(again.plan.rows) == 1
    close(again.logits, full_logits(model, RIGHT))


def test_a_fork_has_the_versions_and_shares_their_payload(model, sequence):
    sequence.resume(BASE, EXACT, version="base")
    sequence.suspend()
    sequence.resume(LEFT, EXACT, version="left")
    fork = sequence.fork()
    bytes_before = sequence.versions.payload_bytes
    payloads = [
        {extent.payload for name in ("base", "left") for extent in kept.get(name).extents}
        for kept in (sequence.versions, fork.versions)
    ]
    assert payloads[0] == payloads[1]
    resumed = fork.resume(BASE, EXACT, version="base")
    assert len(resumed.plan.rows) == 1
    fork.suspend()
    assert len(fork.versions) == 2 and sequence.versions.payload_bytes == bytes_before


def check_cycles(model, cycles, **options):
    """Suspend, edit, resume: bytes of untouched rows stay, memory and metadata do not grow, and
    results are those of a fresh sequence that is given the same checkpoint."""
    budget = 600_000  # a version takes 220,000 alone, and 35,000 beside another
    versions = CheckpointVersions(MemoryBudget(budget))
    sequence = sequence_of(model, versions=versions, **options)
    ids = random_ids(1, 500)
    sequence.resume(ids, PATCH, version="0")
    sequence.suspend("now")
    untouched = np.arange(384, 480)
    first = stored_rows(sequence.checkpoint, untouched)
    rng = np.random.default_rng(0)
    compared, kept = 0, []
    for cycle in range(1, cycles + 1):
        at = int(rng.integers(50, 200))
        new = edited(ids, [(at, 7, 7)])
        new[at] = 3 + cycle % 90  # each version is another
        given = sequence.checkpoint
        resumed = sequence.resume(new, PATCH, version=str(cycle))
        if resumed.resumed_from == str(cycle - 1) and compared <= cycle // 4:
            fresh = sequence_of(model)
            fresh.adopt("given", CheckpointLoad(given))
            assert torch.equal(fresh.resume(new, PATCH).logits, resumed.logits)
            compared += 1
        sequence.append(5)
        sequence.suspend("now")
        ids = new
        assert stored_rows(sequence.checkpoint, untouched) == first
        assert sequence.versions.payload_bytes <= budget
        kept.append(len(sequence.versions))
        assert len(sequence.checkpoint.extents) <= 24
    assert compared > cycles / 5
    assert min(kept[3:]) >= 3


@pytest.fixture
def mixed(monkeypatch):
    """A storage that has blocks in all formats, by their place."""
    cycle = [PayloadFormat.K8V8, PayloadFormat.K8V4, PayloadFormat.F16]

    def chosen(policy, values, ranges, scores, *, tokens):
        return [cycle[position // 32 % 3] for _, _, position in ranges]

    monkeypatch.setattr(offload_module, "block_formats", chosen)
    return PrecisionPolicy()


def test_twenty_cycles_change_no_stored_byte(model):
    check_cycles(model, 20)


def test_twenty_cycles_in_all_formats_change_no_stored_byte(model, mixed):
    check_cycles(model, 20, storage=mixed)


@pytest.mark.slow
def test_two_hundred_cycles_change_no_stored_byte(model, mixed):
    check_cycles(model, 200)
    check_cycles(model, 200, storage=mixed)


def test_what_is_stored_with_loss_is_not_called_exact(model, mixed):
    sequence = sequence_of(model, storage=mixed)
    sequence.resume(BASE, PATCH, version="base")
    sequence.suspend("now")
    assert set(sequence.checkpoint.origins) == {-3, -2, -1, 0}  # 0: the incomplete block at the end
    plan = sequence.resume(np.append(BASE, [7, 8]), PATCH, version="next").plan
    assert plan.count(RowLabel.PREFIX) == 500 % 32 and plan.count(RowLabel.RESTORED) == 480
    assert not plan.is_exact and len(plan.rows) == 2
    origins = sequence.checkpoint.origins
    assert not origins[480:500].any() and (origins[500:] == 1).all() and (origins[:480] < 0).all()
    exact = sequence.resume(np.append(BASE, [7, 8]), EXACT, version="exact")
    assert exact.plan.is_exact and exact.plan.count(RowLabel.PREFIX) == 20
    close(exact.logits, full_logits(model, np.append(BASE, [7, 8])))
    assert not sequence.checkpoint.origins.any()


def test_a_quantised_row_behind_an_edit_ages_like_any_other(model, mixed):
    sequence = sequence_of(model, storage=mixed)
    sequence.resume(BASE, PATCH, version="base")
    sequence.suspend("now")
    resumed = sequence.resume(edited(BASE, [(120, 30, 41)]), PATCH, version="new")
    restored = resumed.plan.labels == RowLabel.RESTORED
    origins = sequence.checkpoint.origins
    assert (origins[:120] < 0).all() and (origins[restored][120:] == 2).all()
    assert sum(resumed.restored_formats.values()) == int(resumed.plan.kept.sum())
    assert set(resumed.restored_formats) == {"f16", "k8v8", "k8v4"}


def test_a_failure_while_storing_is_told_at_the_next_resume(model, sequence, monkeypatch):
    """The rows are lost, the call is not."""
    sequence.resume(BASE, EXACT, version="base")
    with monkeypatch.context() as patched:
        patched.setattr(sequence_module, "offload", lambda *args, **options: 1 / 0)
        sequence.suspend()
        resumed = sequence.resume(BASE, EXACT)
    assert "division by zero" in resumed.trouble
    assert len(resumed.plan.rows) == len(BASE) and resumed.resumed_from is None
    close(resumed.logits, full_logits(model, BASE))
    assert sequence.resume(BASE, EXACT).trouble is None


@pytest.mark.parametrize("broken_layer", [1, 3, None])
def test_a_checkpoint_that_does_not_arrive_is_computed_instead(
    model, sequence, broken_layer, monkeypatch
):
    """Rows still on their way when the call begins; a part is late or damaged, in any layer or
    after the last that this call needs."""
    monkeypatch.setattr(restore, "ARRIVING_LAYERS", 1)
    donor = sequence_of(model)
    donor.resume(BASE, EXACT)
    donor.suspend()

    class Damaged(CheckpointLoad):
        def wait(self, layers=None):
            if layers == broken_layer:
                raise CheckpointError("part 7 is damaged")

    sequence.adopt("stored", Damaged(donor.checkpoint))
    resumed = sequence.resume(LEFT, PATCH)
    assert "part 7 is damaged" in resumed.trouble
    assert len(resumed.plan.rows) == len(LEFT)
    close(resumed.logits, full_logits(model, LEFT))
    whole = sequence_of(model)
    whole.adopt("stored", CheckpointLoad(donor.checkpoint))
    assert whole.resume(LEFT, PATCH).plan.count(RowLabel.PREFIX) == 300


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("action", ["fork", "truncate"])
def test_rows_that_are_arriving_are_waited_for(model, sequence, action, broken):
    """Before a resume waited for them, a fork shared rows that might never come, and truncating
    copied what was in memory in their place; both called exact."""
    donor = sequence_of(model)
    donor.resume(BASE, EXACT)
    donor.suspend()

    class Slow(CheckpointLoad):
        arrived = False

        def wait(self, layers=None):
            if broken:
                raise CheckpointError("part 7 is damaged")
            self.arrived = True

    load = Slow(donor.checkpoint)
    sequence.adopt("stored", load)
    if action == "fork":
        sequence = sequence.fork()
    else:
        sequence.truncate(300)
    assert load.arrived is not broken
    resumed = sequence.resume(LEFT, EXACT)
    assert resumed.plan.count(RowLabel.PREFIX) == (0 if broken else 300)
    close(resumed.logits, full_logits(model, LEFT))


def test_a_checkpoint_of_another_model_is_refused(model, sequence):
    other = sequence_of(tiny_model("llama-one-kv-head"))
    other.resume(BASE, EXACT)
    other.suspend()
    with pytest.raises(CheckpointError, match=r"3 layers of 1 heads.*3 of 2"):
        sequence.adopt("foreign", CheckpointLoad(other.checkpoint))


@pytest.mark.parametrize("live", [True, False])
def test_truncating_leaves_no_payload_in_reach(model, sequence, live):
    sequence.resume(BASE, EXACT, version="base")
    sequence.suspend()
    kept = stored_rows(sequence.checkpoint, np.arange(300))
    if live:
        sequence.resume(LEFT, EXACT, version="left")
        sequence.append(5)
    sequence.truncate(300)
    assert not sequence.is_live and len(sequence.token_ids) == 300
    assert stored_rows(sequence.checkpoint, np.arange(300)) == kept
    rows = sum(payload.rows for payload in {e.payload for e in sequence.checkpoint.extents})
    assert rows == 300
    sequence.versions.drop(["base", "left"])
    resumed = sequence.resume(RIGHT, PATCH.varied(tail_tokens=1))
    assert len(resumed.plan.rows) == 200
    close(resumed.logits, full_logits(model, RIGHT))


def test_a_suspend_loses_nothing_while_there_is_room(model, mixed):
    """It stored with loss though memory was free, and from then on a plain append of another turn
    was an approximation."""
    sequence = sequence_of(model, storage=mixed)
    sequence.resume(BASE, PATCH, version="base")
    sequence.suspend()
    longer = np.append(BASE, [7, 8])
    plan = sequence.resume(longer, PATCH, version="next").plan
    assert plan.is_exact and plan.count(RowLabel.PREFIX) == 500
    close(sequence.append(9), full_logits(model, np.append(longer, [9])))


def test_beyond_the_budget_rows_are_packed_as_if_they_had_been_at_once(model, mixed):
    """In the same formats and bytes, and marked as quantised."""
    lossless, pinned = sequence_of(model, storage=mixed), sequence_of(model, storage=mixed)
    lossless.resume(BASE, PATCH, version="base")
    lossless.suspend()
    pinned.resume(BASE, PATCH, version="base")
    pinned.suspend("now")
    assert not lossless.checkpoint.origins.any()
    lossless.pack()
    every = np.arange(500)
    assert stored_rows(lossless.checkpoint, every) == stored_rows(pinned.checkpoint, every)
    assert np.array_equal(lossless.checkpoint.origins, pinned.checkpoint.origins)
    assert lossless.versions.payload_bytes == pinned.versions.payload_bytes
    resumed = lossless.resume(np.append(BASE, [7]), PATCH)
    assert not resumed.plan.is_exact and resumed.restored_formats["k8v8"] > 0


def test_versions_are_packed_together(model, mixed):
    """Rows that they share are encoded once; those of a version that must not lose any stay."""
    sequence = sequence_of(model, storage=mixed)
    versions = {
        "base": (BASE, PATCH),
        "new": (edited(BASE, [(250, 7, 9)]), PATCH),
        "exact": (edited(BASE, [(100, 7, 9)]), EXACT),
    }
    for name, (ids, policy) in versions.items():
        sequence.resume(ids, policy, version=name)
        sequence.suspend()
    before = sequence.versions.payload_bytes
    exact = stored_rows(sequence.versions.get("exact"), np.arange(500))
    sequence.pack()
    base, new = (sequence.versions.get(name) for name in ("base", "new"))
    assert {e.payload for e in base.extents if e.stop <= 224} == {
        e.payload for e in new.extents if e.stop <= 224
    }
    assert (base.origins[:480] < 0).all() and (new.origins[:224] < 0).all()
    assert len(base.stored) == base.stored.sum() == 500
    assert stored_rows(sequence.versions.get("exact"), np.arange(500)) == exact
    assert not sequence.versions.get("exact").origins.any()
    assert sequence.versions.payload_bytes < before
    for name, (ids, policy) in versions.items():
        resumed = sequence.fork().resume(ids, policy)
        assert resumed.resumed_from == name
        torch.testing.assert_close(resumed.logits, full_logits(model, ids), atol=0.6, rtol=0)


def test_the_budget_is_shared_and_takes_from_what_was_used_longest_ago(model, mixed):
    """Each thread had 2 GiB of its own."""
    budget = MemoryBudget(10**9)
    adapter, rope = ModelAdapter(model), rope_of(model)
    sequences = [
        KVSequence(adapter, rope, versions=CheckpointVersions(budget), storage=mixed)
        for _ in range(4)
    ]
    for number, sequence in enumerate(sequences):
        sequence.resume(random_ids(number, 500), PATCH, version="only")
        sequence.suspend()
    one = sequences[0].versions.payload_bytes
    assert budget.used_bytes == 4 * one

    def states():
        budget.fit()
        checkpoints = [each.versions.get("only") for each in sequences]
        return [c and ("packed" if c.origins.any() else "lossless") for c in checkpoints]

    assert states() == ["lossless"] * 4
    sequences[0].versions.touch("only")
    budget.limit_bytes = int(3.5 * one)
    assert states() == ["lossless", "packed", "lossless", "lossless"]
    budget.limit_bytes = int(1.9 * one)
    assert states() == ["packed", "packed", "packed", "packed"]
    budget.limit_bytes = int(1.2 * one)
    assert states()[:2] == ["packed", None]
    budget.limit_bytes = 1
    assert states() == ["packed", None, None, None]  # what was used last stays
    assert not len(sequences[1].token_ids)
    resumed = sequences[1].resume(random_ids(1, 500), PATCH)
    assert resumed.plan.is_exact and len(resumed.plan.rows) == 500


def test_eviction_takes_time_in_proportion_to_the_versions(model):
    """All rows of all versions were counted again for each one that went."""

    def calls(threads: int) -> int:
        budget = MemoryBudget(10**9)
        sequences = [
            sequence_of(model, versions=CheckpointVersions(budget)) for _ in range(threads)
        ]
        for number, sequence in enumerate(sequences):
            sequence.resume(random_ids(number, 20), EXACT, version="only")
            sequence.suspend()
        budget.limit_bytes = 1
        counted = count_calls(budget.fit)
        assert sum(len(sequence.versions) for sequence in sequences) == 1
        return counted

    assert calls(64) < 6 * calls(16)


def test_nobody_waits_while_another_thread_is_packed(model):
    """The lock that packing holds, for seconds where much is packed, was taken to plan a resume,
    to make a thread, and to ask how much memory is used."""
    budget = MemoryBudget(10**9)
    sequence, other = (
        sequence_of(model, versions=CheckpointVersions(budget), storage=PrecisionPolicy())
        for _ in range(2)
    )
    for each in (sequence, other):
        each.resume(BASE, EXACT, version="base")
        each.suspend()
    packing, go_on = threading.Event(), threading.Event()

    def slow(checkpoint):
        packing.set()
        assert go_on.wait(60)
        return checkpoint

    sequence.versions.put("slow", sequence.checkpoint, pack=slow)
    budget.limit_bytes = 1

    def use() -> None:
        try:
            assert packing.wait(60)
            assert budget.used_bytes > 0
            CheckpointVersions(budget)
            assert other.resume(LEFT, EXACT, version="left").resumed_from == "base"
            assert not go_on.is_set()
        finally:
            go_on.set()

    run_all(use, budget.fit)
