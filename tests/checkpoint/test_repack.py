"""Repacking moves live rows byte for byte and leaves no others behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from patchkv_agents.checkpoint.extents import extents_of, moved_extents
from patchkv_agents.checkpoint.repack import repacked, used_rows, worth_repacking
from patchkv_kernels.payload import PayloadFormat

from .rows import as_format, checkpoint_of, scaled_payload, stored_rows


def positions_of(extents):
    return np.concatenate([np.arange(e.position, e.stop) for e in extents] or [np.zeros(0, int)])


@given(data=st.data())
def test_every_version_keeps_every_byte(data):
    """Versions that refer to random rows of payloads in two formats, in random order."""
    sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)
    first, second, third = (data.draw(sizes) for _ in range(3))
    payloads = [
        scaled_payload(first, np.cumsum([0, *first[:-1]]).tolist()),
        scaled_payload(second, [100 + 7 * n for n in range(len(second))], first=40),
        as_format(
            scaled_payload(third, [200 + 5 * n for n in range(len(third))], first=80),
            PayloadFormat.K4V4,
        ),
    ]
    stored, at = [], 0
    for payload in payloads:
        starts = at + payload.block_rows[:-1]
        stored += extents_of(payload, starts.tolist())
        at += payload.rows
    versions = []
    for _ in range(data.draw(st.integers(1, 3))):
        kept = data.draw(st.lists(st.integers(0, at - 1), unique=True, max_size=at))
        versions.append(moved_extents(stored, np.array(kept, dtype=np.int64)))
    chosen = set(data.draw(st.lists(st.sampled_from(payloads), max_size=3)))
    anew = repacked(versions, chosen)
    for before, after in zip(versions, anew, strict=True):
        where = positions_of(before)
        assert np.array_equal(positions_of(after), where)
        tokens = int(where.max(initial=-1)) + 1
        assert stored_rows(checkpoint_of(after, tokens), where) == stored_rows(
            checkpoint_of(before, tokens), where
        )
    used = used_rows(anew)
    assert not set(used) & chosen
    assert all(mask.all() for payload, mask in used.items() if payload not in payloads)


def test_the_first_versions_rows_end_up_in_one_extent():
    one = scaled_payload([8], [0])
    two = scaled_payload([8], [8], first=8)
    newest = (*extents_of(one, [0]), *extents_of(two, [8]))
    oldest = moved_extents(newest, np.array([0, 1, 2, 12, 13]))
    assert len(newest) == 2
    newest, oldest = repacked([newest, oldest], {one, two})
    assert [(e.row, e.length) for e in newest] == [(0, 16)]
    assert [(e.row, e.length) for e in oldest] == [(0, 3), (12, 2)]


def test_what_is_half_used_or_small_beside_its_like_is_worth_it():
    large, other = scaled_payload([4] * 20, list(range(0, 80, 4))), scaled_payload([40], [0])
    small, native = scaled_payload([8], [0]), scaled_payload([8], [0])
    native = replace(native, format=PayloadFormat.NATIVE)

    def chosen(**rows):
        payloads = {"large": large, "other": other, "small": small, "native": native}
        used = {p: np.arange(p.rows) < rows[name] for name, p in payloads.items() if name in rows}
        worth = worth_repacking(used)
        return {name for name, payload in payloads.items() if payload in worth}

    assert chosen(large=80) == set()
    assert chosen(large=40) == set()  # exactly half
    assert chosen(large=39) == {"large"}
    assert chosen(large=80, small=8) == set()
    assert chosen(large=80, other=40) == {"large", "other"}
    assert chosen(large=80, other=20, small=8) == set()  # 20 > 2 * 8
    assert chosen(large=80, other=16, small=8) == {"other", "small"}  # 80 > 2 * (16 + 8)
    assert chosen(small=8, native=8) == set()  # formats stay apart


def test_many_small_payloads_become_few_and_each_row_is_copied_few_times():
    """200 turns of eight rows each: payloads grow with the logarithm, copies too."""
    extents, copied, tokens = (), 0, 0
    for _ in range(200):
        fresh = scaled_payload([8], [tokens])
        extents = (*extents, *extents_of(fresh, [tokens]))
        tokens += 8
        chosen = worth_repacking(used_rows([extents]))
        copied += sum(payload.rows for payload in chosen)
        (extents,) = repacked([extents], chosen)
    assert len({extent.payload for extent in extents}) <= 8
    assert len(extents) <= 8
    assert copied <= 8 * tokens
