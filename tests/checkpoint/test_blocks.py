"""Source blocks and extents: what is stored, and where an edit moves it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchkv_agents.checkpoint import Checkpoint, store_rows
from patchkv_agents.checkpoint.blocks import moved_extents, stored_mask
from patchkv_agents.ranges import RowSet


def rows_of(tokens):
    """A cache whose every key and value names its row."""
    keys = torch.arange(tokens, dtype=torch.float32)[None, None, :, None].expand(2, 3, tokens, 4)
    return keys.clone(), -keys.clone()


def read(extents, tokens):
    """The row number found at each position, -1 where no extent is; each position once."""
    found = np.full(tokens, -1)
    for extent in extents:
        rows = slice(extent.offset, extent.offset + extent.length)
        assert (found[extent.position : extent.stop] == -1).all()
        keys = extent.block.keys[1, 2, rows, 3]
        assert torch.equal(keys, -extent.block.values[0, 0, rows, 0])
        found[extent.position : extent.stop] = keys.numpy()
    return found


def test_rows_are_stored_on_the_grid_and_copied():
    keys, values = rows_of(100)
    extents = store_rows(keys, values, RowSet(((5, 40), (64, 70))), block_size=32)
    assert [(e.position, e.stop) for e in extents] == [(5, 32), (32, 40), (64, 70)]
    keys.zero_()
    values.zero_()
    expected = np.where(stored_mask(extents, 100), np.arange(100), -1)
    assert np.array_equal(read(extents, 100), expected)


@given(
    stored=st.lists(st.booleans(), min_size=1, max_size=70),
    block_size=st.sampled_from([1, 4, 32]),
    data=st.data(),
)
def test_moved_extents_hold_the_same_rows_at_their_new_positions(stored, block_size, data):
    """Random subsets of random rows, moved by random gaps: two edits in a row."""
    tokens = len(stored)
    keys, values = rows_of(tokens)
    extents = store_rows(keys, values, RowSet.of_mask(np.array(stored)), block_size)
    content = read(extents, tokens)
    for _ in range(2):
        kept = data.draw(st.lists(st.booleans(), min_size=len(content), max_size=len(content)))
        source = []
        for position in np.flatnonzero(kept):
            source += [-1] * data.draw(st.integers(0, 2)) + [position]
        source = np.array([*source, -1], dtype=np.int64)
        extents = moved_extents(extents, source)
        content = np.where(source >= 0, content[source], -1)
        assert np.array_equal(read(extents, len(source)), content)
        for extent in extents:
            row = int(extent.block.keys[0, 0, extent.offset, 0])
            assert extent.delta == extent.position - row


def test_a_checkpoint_counts_shared_payload_once():
    keys, values = rows_of(64)
    extents = store_rows(keys, values, RowSet(((0, 32),)), block_size=32)
    checkpoint = Checkpoint(
        np.arange(64), np.zeros(64, np.int16), np.zeros(64, np.float32), extents
    )
    assert checkpoint.stored.tolist() == [True] * 32 + [False] * 32
    assert checkpoint.payload_bytes == 2 * (2 * 3 * 32 * 4 * 4)
    source = np.array([0, 1, 2, -1, 20, 21])
    split = checkpoint.stored_at(source)
    assert len(split) == 2 and split[0].block is split[1].block
    rest = store_rows(keys, values, RowSet(((32, 64),)), block_size=32)
    whole = checkpoint.with_stored(rest)
    assert whole.stored.all() and not checkpoint.stored.all()
    assert whole.payload_bytes == 2 * checkpoint.payload_bytes
