"""Offload: every row is encoded once, from the bits that the model wrote."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from patchkv_agents.checkpoint import offload as offload_module
from patchkv_agents.checkpoint.checkpoint import Checkpoint
from patchkv_agents.checkpoint.offload import offload, store_rows
from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.checkpoint.shards import CacheShard
from patchkv_agents.recovery.restore import Restoration
from patchkv_kernels import PayloadFormat, Rope, RopeLayout, quantize_gather

from .rows import stored_rows

ROPE = Rope(np.array([1.0, 0.3, 0.01], dtype=np.float32), RopeLayout.HALF_SPLIT)
CYCLE = [PayloadFormat.K8V8, PayloadFormat.K8V4, PayloadFormat.F16]
TOKENS = 100


@pytest.fixture(autouse=True)
def formats(monkeypatch):
    """Formats in turn by the block's place in the version, whatever the scores."""

    def chosen(policy, values, ranges, scores, *, tokens):
        assert len(scores) == sum(stop - start for start, stop, _ in ranges)
        return [CYCLE[position // 32 % 3] for _, _, position in ranges]

    monkeypatch.setattr(offload_module, "block_formats", chosen)


def cache_of(tokens=TOKENS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    keys, values = torch.randn(2, 3, 2, tokens + 9, 8, generator=generator)
    return keys.to(dtype), values.to(dtype)


def unstored(tokens=TOKENS, origins=None):
    origins = np.zeros(tokens, np.int16) if origins is None else origins
    return Checkpoint(np.arange(tokens), origins, np.full(tokens, 1 / tokens, np.float32))


def mixed(checkpoint, keys, values):
    shards = [CacheShard(0, keys, values)]
    return offload(checkpoint, shards, rope=ROPE, precision=PrecisionPolicy())


def formats_of(checkpoint):
    return [(e.payload.format, e.position, e.stop) for e in checkpoint.extents]


def restored(checkpoint):
    keys, values = torch.full((2, 3, 2, len(checkpoint), 8), float("nan"))
    Restoration(checkpoint.extents, [CacheShard(0, keys, values)], ROPE)
    return keys, values


def test_without_a_precision_policy_every_row_is_stored_bit_for_bit():
    keys, values = cache_of()
    stored = offload(unstored(), [CacheShard(0, keys, values)], rope=ROPE, precision=None)
    assert formats_of(stored) == [(PayloadFormat.NATIVE, 0, TOKENS)]
    assert not stored.origins.any()
    again = restored(stored)
    assert torch.equal(again[0], keys[:, :, :TOKENS]) and torch.equal(
        again[1], values[:, :, :TOKENS]
    )


def test_blocks_get_their_formats_and_an_incomplete_one_stays_as_it_is():
    keys, values = cache_of()
    origins = np.zeros(TOKENS, np.int16)
    origins[40:] = 2  # stale rows stay stale
    stored = mixed(unstored(origins=origins), keys, values)
    assert formats_of(stored) == [
        (PayloadFormat.K8V8, 0, 32),
        (PayloadFormat.K8V4, 32, 64),
        (PayloadFormat.F16, 64, 96),
        (PayloadFormat.NATIVE, 96, 100),
    ]
    assert stored.origins.tolist() == [-2] * 32 + [-3] * 8 + [2] * 60
    for actual, expected in zip(restored(stored), (keys, values), strict=True):
        error = (actual - expected[:, :, :TOKENS]).norm() / expected.norm()
        assert 0 < error < 0.06
    channels = {id(e.payload.key_channels) for e in stored.extents if e.payload.format.is_quantised}
    assert len(channels) == 1


def test_sixteen_bits_of_a_sixteen_bit_model_are_exact():
    keys, values = cache_of(dtype=torch.bfloat16)
    stored = mixed(unstored(), keys, values)
    assert stored.origins[64:].tolist() == [0] * 36
    assert torch.equal(stored.extents[2].payload.keys, keys[:, :, 64:96])


def test_a_block_is_encoded_when_it_is_complete_and_quantised_rows_never_again():
    """The cache's rows that are stored with loss are NaN at the second offload: nothing reads
    them. The block that was incomplete becomes what it would have become at once."""
    keys, values = cache_of(tokens=140)
    first = mixed(unstored(), keys, values)
    grown = replace(
        unstored(140),
        origins=np.append(first.origins, np.zeros(40, np.int16)),
        extents=first.extents,
    )
    lossy = grown.origins < 0
    keys[:, :, :140][:, :, lossy] = float("nan")
    values[:, :, :140][:, :, lossy] = float("nan")
    second = mixed(grown, keys, values)
    before = np.arange(96)
    assert stored_rows(second, before) == stored_rows(first, before)
    assert formats_of(second)[3:] == [
        (PayloadFormat.K8V8, 96, 128),
        (PayloadFormat.NATIVE, 128, 140),
    ]
    assert (second.origins[96:128] == -2).all() and not second.origins[128:].any()
    block = quantize_gather(
        keys,
        values,
        [(96, 128, 96)],
        format=PayloadFormat.K8V8,
        rope=ROPE,
        channels=first.extents[0].payload.key_channels,
    )
    (extent,) = [e for e in second.extents if e.position == 96]
    assert extent.payload.key_channels is first.extents[0].payload.key_channels
    assert torch.equal(extent.payload.keys, block.keys)
    assert torch.equal(extent.payload.values, block.values)


def test_rows_stored_in_haste_are_encoded_from_their_own_bits():
    """An edit moved rows of a live cache, so they were stored as they were. Their keys in the cache
    are rotated by now; the payload keeps the position at which they were written."""
    keys, values = cache_of(tokens=140)
    hasty = store_rows([CacheShard(0, keys, values)], np.arange(140) >= 70, ROPE)
    source = np.where(np.arange(128) < 60, -1, np.arange(128) + 10)
    moved = replace(unstored(128), extents=unstored(140).with_extents(hasty).stored_at(source))
    keys[:, :, 60:128], values[:, :, 60:128] = float("nan"), float("nan")
    stored = mixed(moved, keys, values)
    assert formats_of(stored)[-2:] == [
        (PayloadFormat.F16, 60, 96),  # written at 70 and 74
        (PayloadFormat.K8V8, 96, 128),  # written at 106
    ]
    assert [extent.delta for extent in stored.extents[-2:]] == [-10, -10]
    for actual, lossless in zip(restored(stored), restored(moved), strict=True):
        error = (actual[:, :, 60:] - lossless[:, :, 60:]).norm() / lossless[:, :, 60:].norm()
        assert 0 < error < 0.01
