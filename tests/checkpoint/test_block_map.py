"""Carrying a block map over to another version, cutting it, refreshing it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from patchkv_agents.checkpoint import Checkpoint
from patchkv_agents.checkpoint.block_map import BlockMap
from patchkv_agents.checkpoint.serialization import arrays_of, checkpoint_of


def known(blocks: int, seed: int = 0) -> BlockMap:
    """A map of blocks of four tokens in which every row is known."""
    mass = np.tril(np.random.default_rng(seed).random((blocks, blocks), dtype=np.float32))
    return BlockMap(4, mass / mass.sum(axis=1, keepdims=True))


def test_an_unchanged_version_keeps_its_map():
    old = known(5)
    np.testing.assert_allclose(old.moved(np.arange(20)).mass, old.mass, atol=1e-6)
    np.testing.assert_allclose(old.moved(np.arange(18)).mass, old.mass, atol=1e-6)


def test_a_block_inserted_in_front_moves_rows_and_columns():
    old = known(3)
    mass = old.moved(np.array([-1] * 4 + list(range(12)))).mass
    np.testing.assert_allclose(mass[1:, 1:], old.mass, atol=1e-6)
    assert not mass[0].any() and not mass[:, 0].any()


def test_what_went_to_a_replaced_block_goes_to_what_took_its_place():
    """Block 1 of three is replaced by two blocks: each gets half, but for rounding to tokens."""
    old = known(3)
    aligned = np.array([0, 1, 2, 3] + [-1] * 8 + [8, 9, 10, 11])
    mass = old.moved(aligned).mass
    assert not mass[1:3].any()  # new blocks: nothing is known of them
    np.testing.assert_allclose(mass[3, [0, 3]], old.mass[2, [0, 2]], atol=1e-6)
    np.testing.assert_allclose(mass[3, 1:3], old.mass[2, 1] / 2, atol=1e-6)


def test_a_row_is_the_mean_of_the_rows_its_tokens_came_from():
    """A token less in front: each block has three tokens of one block and one of the next."""
    old = known(3)
    mass = old.moved(np.arange(1, 12)).mass
    by_token = np.repeat(np.repeat(old.mass, 4, axis=0), 4, axis=1)[1:, 1:] / 4
    columns = np.add.reduceat(by_token, [0, 4, 8], axis=1)
    columns[:, 0] += old.mass[np.arange(1, 12) // 4, 0] / 4  # of the removed token
    rows = np.stack([columns[part].mean(axis=0) for part in (slice(4), slice(4, 8), slice(8, 11))])
    later = np.triu(rows, 1).sum(axis=1)
    np.testing.assert_allclose(mass, np.tril(rows) + np.diag(later), atol=1e-6)


@given(st.data())
def test_rows_stay_shares_of_one_under_any_edits(data):
    tokens = data.draw(st.integers(1, 60))
    old = known(-(-tokens // 4), seed=tokens)
    for _ in range(3):
        pieces = []
        kept = sorted(data.draw(st.sets(st.integers(0, tokens - 1))))
        for position in kept:
            pieces += [-1] * data.draw(st.integers(0, 3)) + [position]
        pieces += [-1] * data.draw(st.integers(not pieces, 5))
        aligned = np.array(pieces)
        moved = old.moved(aligned)
        sums = moved.mass.sum(axis=1)
        assert moved.mass.shape == (-(-len(aligned) // 4),) * 2
        assert np.array_equal(moved.mass, np.tril(moved.mass)) and (moved.mass >= 0).all()
        assert ((np.abs(sums - 1) < 1e-4) | (sums == 0)).all()
        first_of = aligned >= 0
        if old.mass.any(axis=1).all():
            blocks_with_state = np.unique(np.flatnonzero(first_of) // 4)
            assert (sums[blocks_with_state] > 0).all()
        old, tokens = moved, len(aligned)


def test_a_cut_leaves_nothing_of_the_block_that_is_cut():
    old = known(4)
    cut = old.truncated(10)
    assert cut.mass.shape == (3, 3)
    assert np.array_equal(cut.mass[:2], np.pad(old.mass[:2, :2], ((0, 0), (0, 1))))
    assert not cut.mass[2].any()
    checkpoint = Checkpoint(
        np.arange(16), np.zeros(16, np.int16), np.zeros(16, np.float32), block_map=old
    )
    assert np.array_equal(checkpoint.truncated(10).block_map.mass, cut.mass)
    assert checkpoint.truncated(99).block_map.mass.shape == (4, 4)


def test_rows_are_refreshed_as_far_as_they_ran():
    old = BlockMap(4, np.array([[1, 0, 0], [0.5, 0.5, 0], [0, 0, 0]], dtype=np.float32))
    fresh = np.array([[0, 0, 0], [6, 2, 0], [1, 1, 2]], dtype=np.float32)
    mass = old.refreshed(fresh, np.array([1, 0.5, 0.25], dtype=np.float32)).mass
    # Not measured: as before; half of it ran: the mean; not known before: what ran.
    np.testing.assert_allclose(mass, [[1, 0, 0], [0.625, 0.375, 0], [0.25, 0.25, 0.5]])


def test_a_stored_map_comes_back_in_half_precision():
    mass = np.tril(np.random.default_rng(0).random((3, 3), dtype=np.float32))
    checkpoint = Checkpoint(
        np.arange(90),
        np.zeros(90, np.int16),
        np.zeros(90, np.float32),
        block_map=BlockMap(32, mass),
    )
    back = checkpoint_of(arrays_of(checkpoint, ()), ()).block_map
    assert back.block_size == 32 and back.mass.dtype == np.float32
    np.testing.assert_allclose(back.mass, mass, rtol=1e-3)
    plain = Checkpoint(np.arange(90), np.zeros(90, np.int16), np.zeros(90, np.float32))
    assert checkpoint_of(arrays_of(plain, ()), ()).block_map is None
