"""Synthetic pairs: always the same, twelve tasks of four kinds, and fit for profiling."""

from __future__ import annotations

from patchkv_agents.alignment import align
from patchkv_agents.context import render
from patchkv_agents.profiling.checking import usable
from patchkv_agents.profiling.gate import Thresholds
from patchkv_agents.profiling.pairs import split, task_groups
from patchkv_agents.profiling.quick import TASKS, quick_pairs
from tests.engine.models import tiny_engine


def test_pairs_are_always_the_same_and_of_four_kinds_in_twelve_tasks():
    pairs = quick_pairs()
    assert pairs == quick_pairs() and pairs.sha256 == quick_pairs().sha256
    assert pairs.tasks == TASKS == 12 and pairs.skipped == ()
    assert [p.kind for p in pairs.pairs] == ["refresh", "flip_noted", "clear", "summarize"] * TASKS
    calibration, validation = split(pairs.pairs)
    assert len(calibration) == len(validation) == 24
    assert len(task_groups(pairs.pairs)) == len(set(task_groups(pairs.pairs).values())) == TASKS
    least = Thresholds()  # the validation half is enough for a pass
    assert len(validation) >= least.pairs and len({p.task for p in validation}) >= least.tasks


def test_a_note_behind_a_flipped_page_says_the_same_in_both_versions():
    """A profile that fails where an edited fact is repeated behind the edit does not pass."""
    for pair in quick_pairs().pairs:
        if pair.kind != "flip_noted":
            continue
        old, new = ([m.text for m in context.messages] for context in (pair.old, pair.new))
        (edited,) = (i for i, (was, now) in enumerate(zip(old, new, strict=True)) if was != now)
        (noted,) = (i for i, text in enumerate(new) if "Note: from memory" in text)
        quoted = new[noted].split("it says: ")[1].split(" The page above decides.")[0]
        assert noted > edited and quoted in new[edited] and quoted not in old[edited]


def test_every_pair_is_usable_and_edits_differ_in_size_and_place(smollm2_tokenizer):
    engine = tiny_engine(smollm2_tokenizer, 8192)
    kept, skipped = usable(engine, quick_pairs())
    pairs = quick_pairs().pairs
    assert (kept, skipped) == (pairs, ())
    lengths, places = [], []
    for pair in pairs:
        old, new = (render(each, smollm2_tokenizer).token_ids for each in (pair.old, pair.new))
        alignment = align(old, new)
        lengths.append(len(new))
        places.append(alignment.prefix / len(new))
    assert min(lengths) < 1500 and 2600 < max(lengths) < 3500
    assert min(places) < 0.3 < 0.5 < max(places)
