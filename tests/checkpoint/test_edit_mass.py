"""How much of the old blocks' attention went to what was edited, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from patchkv_agents.alignment import Alignment
from patchkv_agents.alignment.result import Run, hunks_between
from patchkv_agents.checkpoint.block_map import BlockMap

MAP = BlockMap(
    10,
    np.array(
        [
            [1.0, 0.0, 0.0, 0.0],
            [0.7, 0.3, 0.0, 0.0],
            [0.5, 0.4, 0.1, 0.0],
            [0.2, 0.1, 0.5, 0.2],
        ],
        dtype=np.float32,
    ),
)


def alignment(*runs: tuple[int, int, int], old: int = 40, new: int = 40) -> Alignment:
    between = hunks_between(tuple(Run(*run) for run in runs), old, new)
    return Alignment(old, new, tuple(Run(*run) for run in runs), between)


def test_mass_given_directly_and_through_one_other_block():
    """Block 1 is edited. 2 gave it 0.4, and 0.1 of its own to itself; 3 gave 0.1, and 0.5 to 2."""
    found = MAP.edit_mass(alignment((0, 0, 12), (15, 15, 25)))
    assert found == pytest.approx([0.0, 0.3, 0.4 + 0.1 * 0.4, 0.1 + 0.5 * 0.4 + 0.2 * 0.1])


def test_a_replacement_edits_every_block_that_it_touches():
    found = MAP.edit_mass(alignment((0, 0, 9), (21, 9, 19), new=28))
    assert found == pytest.approx([1.0, 1.0, 1.0, 0.8 + 0.2 * 0.8])


def test_an_insertion_edits_the_blocks_on_its_two_sides():
    between = MAP.edit_mass(alignment((0, 0, 20), (20, 25, 20), new=45))
    assert between == pytest.approx([0.0, 0.3, 0.5, 0.6 + 0.2 * 0.6])  # blocks 1 and 2
    within = MAP.edit_mass(alignment((0, 0, 25), (25, 30, 15), new=45))
    assert within == pytest.approx([0.0, 0.0, 0.1, 0.5 + 0.2 * 0.5])  # block 2
    in_front = MAP.edit_mass(alignment((0, 5, 40), new=45))
    through_others = 0.1 * 0.7 + 0.5 * 0.5 + 0.2 * 0.2
    assert in_front == pytest.approx([1.0, 0.7 + 0.3 * 0.7, 0.83, 0.2 + through_others])


def test_what_is_appended_changes_nothing_in_front_of_it():
    assert not MAP.edit_mass(alignment((0, 0, 40), new=50)).any()


def test_what_is_unknown_has_no_mass():
    mass = MAP.mass.copy()
    mass[2] = 0
    found = BlockMap(10, mass).edit_mass(alignment((0, 0, 12), (15, 15, 25)))
    assert found == pytest.approx([0.0, 0.3, 0.0, 0.1 + 0.2 * 0.1])
