"""Stored rows into a cache: all of them, no others, and no layer before it is asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patchkv_agents.checkpoint.extents import moved_extents
from patchkv_agents.checkpoint.offload import store_rows
from patchkv_agents.checkpoint.shards import CacheShard
from patchkv_agents.recovery import restore
from patchkv_agents.recovery.restore import Restoration
from patchkv_kernels import Rope, RopeLayout

LAYERS, TOKENS = 3, 97
ROPE = Rope(np.array([1.0, 0.3, 0.01], dtype=np.float32), RopeLayout.HALF_SPLIT)


def stored():
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, LAYERS, 2, TOKENS, 8, generator=generator)
    first = store_rows([CacheShard(0, keys, values)], np.arange(TOKENS) < 40, ROPE)
    second = store_rows([CacheShard(0, keys, values)], np.arange(TOKENS) >= 40, ROPE)
    return keys, values, (*first, *second)


def poisoned():
    return torch.full((2, LAYERS, 2, 130, 8), float("nan"))


@pytest.mark.parametrize("arriving", [False, True])
def test_all_and_only_the_wanted_rows_are_written(arriving, monkeypatch):
    """Rows of two payloads, some moved, some left out, into a cache full of NaN."""
    monkeypatch.setattr(restore, "ARRIVING_LAYERS", 1)
    keys, values, extents = stored()
    source = np.full(130, -1)
    source[0:33] = np.arange(33)
    source[50:110] = np.arange(37, 97)
    new_keys, new_values = poisoned()
    waited: list[int] = []
    restoration = Restoration(
        moved_extents(extents, source),
        [CacheShard(0, new_keys, new_values)],
        ROPE,
        waited.append if arriving else None,
    )
    for layer in range(LAYERS):
        if arriving:
            assert new_values[layer:].isnan().all() and waited == list(range(1, layer + 1))
        restoration.ready(layer)
        restoration.ready(layer)
    wanted = source >= 0
    assert torch.equal(new_values[:, :, wanted], values[:, :, source[wanted]])
    assert torch.equal(new_keys[:, :, :33], keys[:, :, :33])
    assert not new_keys[:, :, wanted].isnan().any()
    assert new_keys[:, :, ~wanted].isnan().all() and new_values[:, :, ~wanted].isnan().all()
    # Channels from 6 on have no position; pairs keep their length.
    assert torch.equal(new_keys[:, :, wanted, 6:], keys[:, :, source[wanted], 6:])
    lengths = [k[..., :3] ** 2 + k[..., 3:6] ** 2 for k in (new_keys, keys)]
    torch.testing.assert_close(lengths[0][:, :, wanted], lengths[1][:, :, source[wanted]])
    assert restoration.formats == {"native": 93}


def test_payload_bytes_count_each_block_that_is_touched_once():
    _, _, extents = stored()
    cache = poisoned()
    source = np.full(130, -1)
    source[[3, 5, 70]] = [3, 5, 70]  # rows 70 and 96 would be in blocks [64, 96) and [96, 97)
    restoration = Restoration(moved_extents(extents, source), [CacheShard(0, *cache)], ROPE)
    row = 2 * LAYERS * 2 * 8 * 4
    assert restoration.payload_bytes == (32 + 32) * row
