"""Payload bytes in parts, and manifests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkv_agents.checkpoint.key import CheckpointKey
from patchkv_agents.checkpoint.serialization import (
    Manifest,
    PayloadBytes,
    PayloadRecord,
    empty_payload,
    joined,
    split,
    tensor_records,
)
from patchkv_agents.checkpoint.stores.conformance import sample_payload
from patchkv_agents.errors import CheckpointError
from patchkv_kernels.payload import Payload, PayloadFormat

FORMATS = (PayloadFormat.NATIVE, PayloadFormat.F16, PayloadFormat.K8V4)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 70),
    shape=st.tuples(st.integers(1, 4), st.sampled_from([1, 3, 9]), st.sampled_from([8, 16])),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    part_bytes=st.integers(100, 20_000),
    data=st.data(),
)
def test_parts_in_any_order_make_the_payload(
    rows: int,
    shape: tuple[int, int, int],
    format: PayloadFormat,
    dtype: torch.dtype,
    part_bytes: int,
    data: st.DataObject,
) -> None:
    payload = sample_payload(rows, format=format, dtype=dtype, shape=shape)
    stream = PayloadBytes(payload, part_bytes)
    parts = [stream.read(part) for part in range(stream.parts)]
    record = PayloadRecord("id", format, tensor_records(payload), part_bytes, ("",) * len(parts))
    assert [len(part) for part in parts] == [record.part_size(n) for n in range(len(parts))]
    assert sum(map(len, parts)) == record.nbytes == sum(t.nbytes for t in payload.tensors.values())

    copy = empty_payload(record, payload.block_rows, payload.positions)
    target = PayloadBytes(copy, part_bytes)
    for part in data.draw(st.permutations(range(len(parts)))):
        target.fill(part, memoryview(parts[part]))
    for name, tensor in payload.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), copy.tensors[name].view(torch.uint8))


@settings(max_examples=60)
@given(rows=st.integers(1, 70), part_bytes=st.integers(100, 20_000), layers=st.integers(0, 4))
def test_parts_before_a_layer_hold_all_layers_below_it(
    rows: int, part_bytes: int, layers: int
) -> None:
    """A load that waits for `layers` layers waits for the parts whose first layer is below."""
    payload = sample_payload(rows, shape=(4, 3, 8), format=PayloadFormat.K8V4)
    stream = PayloadBytes(payload, part_bytes)
    record = PayloadRecord("id", payload.format, tensor_records(payload), part_bytes, ())
    copy = empty_payload(record, payload.block_rows, payload.positions)
    target = PayloadBytes(copy, part_bytes)
    first_layers = [record.first_layer(part) for part in range(stream.parts)]
    assert first_layers == sorted(first_layers)
    for part, first_layer in enumerate(first_layers):
        if first_layer < layers:
            target.fill(part, memoryview(stream.read(part)))
    for name, tensor in payload.tensors.items():
        bits = [t[:layers].contiguous().view(torch.uint8) for t in (tensor, copy.tensors[name])]
        assert torch.equal(*bits)


def test_tensors_without_layers_in_front_are_refused() -> None:
    payload = sample_payload(33, format=PayloadFormat.K8V8)
    wrong = Payload(
        payload.format,
        payload.keys,
        payload.values,
        payload.block_rows,
        payload.positions,
        key_scales=torch.ones(1, 33),
    )
    with pytest.raises(CheckpointError, match="key_scales .* layers first"):
        PayloadBytes(wrong, 4096)


def test_manifests_come_back_equal() -> None:
    payload = sample_payload(33, format=PayloadFormat.K8V4)
    record = PayloadRecord("id", payload.format, tensor_records(payload), 4096, ("a", "b"))
    key = CheckpointKey("model", "tenant ü", "\ud800", "", "version\n")
    shapes = {"token_ids": ("int64", (3,)), "extents": ("int64", (0, 4))}
    manifest = Manifest(key, "arrays", "checksum", shapes, (record,))
    assert Manifest.decode(manifest.encode()) == manifest


def test_arrays_come_back_equal() -> None:
    arrays = {
        "a": np.arange(7),
        "b": np.arange(6, dtype=np.int16).reshape(2, 3),
        "none": np.empty((0, 4)),
        "c": np.array([np.nan, 1.0], dtype=np.float32),
    }
    data, shapes = joined(arrays)
    again = split(data, shapes)
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        assert again[name].dtype == array.dtype and again[name].shape == array.shape
        assert again[name].tobytes() == array.tobytes()
