"""Extents: what is stored, and where an edit moves it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from patchkv_agents.checkpoint.extents import extents_of, moved_extents, stored_mask
from patchkv_agents.checkpoint.offload import store_rows
from patchkv_agents.checkpoint.shards import CacheShard

from .rows import ROPE, cache_of, checkpoint_of, mask, read, scaled_payload


def test_rows_are_copied_into_one_payload_in_blocks_of_the_grid():
    keys, values = cache_of(100)
    rows = mask((5, 40), (64, 70), tokens=100)
    extents = store_rows([CacheShard(0, keys, values)], rows, ROPE)
    assert [(e.position, e.stop) for e in extents] == [(5, 40), (64, 70)]
    assert extents[0].payload is extents[1].payload
    assert extents[0].payload.block_rows.tolist() == [0, 27, 35, 41]
    keys.zero_()
    values.zero_()
    assert np.array_equal(read(extents, 100), np.where(rows, np.arange(100), -1))


def test_blocks_are_one_extent_only_where_stored_written_and_wanted_rows_continue():
    payload = scaled_payload([4, 4, 4, 4], positions=[10, 14, 18, 50])
    extents = extents_of(payload, [10, 14, 30, 34])
    # The third block is elsewhere in the version, the fourth was written elsewhere.
    assert [(e.row, e.length, e.position, e.delta) for e in extents] == [
        (0, 8, 10, 0),
        (8, 4, 30, 12),
        (12, 4, 34, -16),
    ]
    assert stored_mask(extents, 40).sum() == 16


@given(stored=st.lists(st.booleans(), min_size=1, max_size=70), data=st.data())
def test_moved_extents_hold_the_same_rows_at_their_new_positions(stored, data):
    """Random subsets of random rows in random pieces and any order: two edits in a row."""
    tokens = len(stored)
    keys, values = cache_of(tokens)
    extents = store_rows([CacheShard(0, keys, values)], np.array(stored), ROPE)
    content = read(extents, tokens)
    for _ in range(2):
        cuts = data.draw(st.lists(st.integers(0, len(content)), max_size=4))
        pieces = np.split(np.arange(len(content)), sorted(cuts))
        source = [-1]
        for piece in data.draw(st.permutations(pieces)):
            source += [-1] * data.draw(st.integers(0, 2)) + piece.tolist()
        dropped = data.draw(st.sets(st.integers(0, len(source) - 1), max_size=5))
        source = np.array([-1 if n in dropped else s for n, s in enumerate(source)])
        extents = moved_extents(extents, source)
        content = np.where(source >= 0, content[source], -1)
        assert np.array_equal(read(extents, len(source)), content)
        for extent in extents:
            row = int(extent.payload.keys[0, 0, extent.row, 0])
            assert extent.delta == extent.position - row
        for first, second in zip(extents, extents[1:], strict=False):
            continues = first.stop == second.position and first.row + first.length == second.row
            assert first.stop <= second.position
            assert not (continues and first.delta == second.delta)


def test_a_checkpoint_counts_shared_payload_once():
    keys, values = cache_of(64)
    extents = store_rows([CacheShard(0, keys, values)], mask((0, 32), tokens=64), ROPE)
    checkpoint = checkpoint_of(extents, 64)
    assert checkpoint.stored.tolist() == [True] * 32 + [False] * 32
    assert checkpoint.payload_bytes == extents[0].payload.nbytes
    split = checkpoint.stored_at(np.array([0, 1, 2, -1, 20, 21]))
    assert len(split) == 2 and split[0].payload is split[1].payload
    rest = store_rows([CacheShard(0, keys, values)], mask((32, 64), tokens=64), ROPE)
    whole = checkpoint.with_extents((*rest, *checkpoint.extents))
    assert whole.stored.all() and not checkpoint.stored.all()
    assert whole.payload_bytes == 2 * checkpoint.payload_bytes
