"""Tests that every checkpoint store must pass. Subclass `StoreConformance` and run it with pytest.

    class TestMyStore(StoreConformance):
        def new_handles(self):
            return MyStore("there"), MyStore("there")

Assertions are plain, and nothing here imports pytest.
"""

# ruff: noqa: D102 (the tests' names say what they hold)

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from patchkv_agents.checkpoint.block_map import MAP_BLOCK, BlockMap
from patchkv_agents.checkpoint.checkpoint import Checkpoint
from patchkv_agents.checkpoint.extents import Extent
from patchkv_agents.checkpoint.key import CheckpointKey
from patchkv_agents.checkpoint.stores.base import CheckpointStore
from patchkv_kernels.payload import Payload, PayloadFormat

KEY = CheckpointKey("model-1", "tenant", "thread", "", "version-1")


def sample_payload(
    rows: int,
    seed: int = 0,
    *,
    format: PayloadFormat = PayloadFormat.NATIVE,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, int, int] = (3, 3, 8),
) -> Payload:
    """A payload of random bits (NaNs among them) in blocks of up to 32 rows.

    Args:
        format: quantised ones are laid out as `K8V4`.
        dtype: of `NATIVE` and `F16` rows.
        shape: layers, kv heads and head dimension.
    """
    layers, heads, width = shape
    generator = torch.Generator().manual_seed(seed)

    def bits(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
        shape = (*sizes[:-1], sizes[-1] * dtype.itemsize)
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)

    starts = np.arange(0, rows, 32)
    sizes = (layers, heads, rows)
    if format is PayloadFormat.NATIVE or format is PayloadFormat.F16:
        tensors = {"keys": bits(dtype, *sizes, width), "values": bits(dtype, *sizes, width)}
    else:
        tensors = {
            "keys": bits(torch.int8, *sizes, width),
            "values": bits(torch.uint8, *sizes, width // 2),
            "key_scales": bits(torch.float16, *sizes),
            "value_scales": bits(torch.uint8, *sizes, -(-width // 32)),
            "key_channels": bits(torch.float16, layers, heads, 2, width),
        }
    return Payload(
        format=format,
        block_rows=np.append(starts, rows).astype(np.int64),
        positions=starts.astype(np.int64) + 5,
        **tensors,
    )


def sample_checkpoint(payloads: Sequence[Payload], seed: int = 0) -> Checkpoint:
    """A checkpoint that refers to every row of the payloads, with one row nowhere at the end."""
    tokens = sum(payload.rows for payload in payloads) + 1
    rng = np.random.default_rng(seed)
    extents, position = [], 0
    for payload in payloads:
        extents.append(Extent(payload, 0, payload.rows, position))
        position += payload.rows
    blocks = -(-tokens // MAP_BLOCK)
    mass = np.tril(rng.random((blocks, blocks), dtype=np.float32))
    return Checkpoint(
        token_ids=rng.integers(0, 50_000, tokens),
        origins=rng.integers(-4, 5, tokens).astype(np.int16),
        scores=rng.random(tokens, dtype=np.float32),
        extents=tuple(extents),
        block_map=BlockMap(MAP_BLOCK, mass.astype(np.float16).astype(np.float32)),
    )


def assert_same(one: Checkpoint | None, other: Checkpoint | None) -> None:
    """Both hold the same, bit for bit."""
    assert one is not None and other is not None
    for name in ("token_ids", "origins", "scores"):
        first, second = getattr(one, name), getattr(other, name)
        assert first.dtype == second.dtype and np.array_equal(first, second), name
    first, second = one.block_map, other.block_map
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert first.block_size == second.block_size and np.array_equal(first.mass, second.mass)
    assert len(one.extents) == len(other.extents)
    partner: dict[Payload, Payload] = {}
    for a, b in zip(one.extents, other.extents, strict=True):
        assert (a.row, a.length, a.position) == (b.row, b.length, b.position)
        assert partner.setdefault(a.payload, b.payload) is b.payload
    for p, q in partner.items():
        assert p.format is q.format and p.tensors.keys() == q.tensors.keys()
        assert np.array_equal(p.block_rows, q.block_rows)
        assert np.array_equal(p.positions, q.positions)
        for name, tensor in p.tensors.items():
            assert tensor.dtype == q.tensors[name].dtype
            assert tensor.shape == q.tensors[name].shape
            bits = [t.contiguous().view(torch.uint8) for t in (tensor, q.tensors[name])]
            assert torch.equal(*bits), name


class StoreConformance:
    """What every store must do, through two handles on one storage."""

    def new_handles(self) -> tuple[CheckpointStore, CheckpointStore]:
        """Two handles on the same new, empty storage; one object twice where it has no second."""
        raise NotImplementedError("say how to open a store, twice")

    def test_what_was_saved_is_loaded_bit_for_bit(self) -> None:
        writer, reader = self.new_handles()
        samples = [
            sample_checkpoint([sample_payload(rows, shape=shape)])
            for rows in (3, 33, 423)
            for shape in ((1, 1, 8), (2, 9, 64))
        ]
        samples += [
            sample_checkpoint([sample_payload(97, dtype=dtype)])
            for dtype in (torch.bfloat16, torch.float16)
        ]
        samples += [
            sample_checkpoint([sample_payload(97, format=PayloadFormat.K8V4)]),
            sample_checkpoint([sample_payload(33, 1), sample_payload(64, 2)]),
            Checkpoint.empty(),
        ]
        for number, checkpoint in enumerate(samples):
            key = replace(KEY, version=f"version-{number}")
            writer.save(key, checkpoint)
            assert_same(checkpoint, reader.load(key))

    def test_tensors_need_not_be_contiguous(self) -> None:
        writer, reader = self.new_handles()
        wide = sample_payload(64)
        part = Payload(
            wide.format,
            wide.keys[:, :, 5:38],
            wide.values.transpose(0, 1)[:, :, 5:38],
            np.array([0, 33]),
            np.array([7]),
        )
        checkpoint = sample_checkpoint([part])
        writer.save(KEY, checkpoint)
        assert_same(checkpoint, reader.load(KEY))

    def test_absent_is_none(self) -> None:
        store, _ = self.new_handles()
        assert store.load(KEY) is None
        assert store.open(KEY) is None

    def test_no_other_key_answers(self) -> None:
        writer, reader = self.new_handles()
        writer.save(KEY, sample_checkpoint([sample_payload(3)]))
        for field in ("fingerprint", "tenant", "thread", "namespace", "version"):
            for other in ("", "other", "../" + getattr(KEY, field), getattr(KEY, field) + "/"):
                if other != getattr(KEY, field):
                    assert reader.load(replace(KEY, **{field: other})) is None, (field, other)
        # Parts of a key do not run into each other.
        assert reader.load(replace(KEY, tenant="tenantt", thread="hread")) is None

    def test_any_text_is_a_key(self) -> None:
        writer, reader = self.new_handles()
        texts = [
            "",
            "../..",
            "/",
            "a/b",
            "A",
            "a",
            "ß%2F",
            "日本語" * 200,
            "\x00\n",
            "\ud800",
            "#1",
        ]
        samples: dict[CheckpointKey, Checkpoint] = {}
        for number, text in enumerate(texts):
            for key in (replace(KEY, version=text), CheckpointKey(text, text, text, text, text)):
                samples[key] = sample_checkpoint([sample_payload(3, number)], seed=len(samples))
                writer.save(key, samples[key])
        for key, checkpoint in samples.items():
            assert_same(checkpoint, reader.load(key))

    def test_saving_again_replaces(self) -> None:
        writer, reader = self.new_handles()
        writer.save(KEY, sample_checkpoint([sample_payload(33)]))
        later = sample_checkpoint([sample_payload(64, 7)], seed=7)
        writer.save(KEY, later)
        assert_same(later, reader.load(KEY))
        assert reader.stats().checkpoints == 1

    def test_versions_share_payload(self) -> None:
        writer, reader = self.new_handles()
        shared = sample_payload(423, shape=(2, 9, 64))
        first = sample_checkpoint([shared])
        writer.save(KEY, first)
        alone = writer.stats().stored_bytes
        second = sample_checkpoint([sample_payload(3, 1), shared], seed=1)
        writer.save(replace(KEY, version="version-2"), second)
        assert writer.stats().stored_bytes - alone < shared.nbytes / 10
        loaded = reader.load(replace(KEY, version="version-2"))
        again = reader.load(KEY)
        assert_same(second, loaded)
        assert_same(first, again)
        assert loaded is not None and again is not None
        assert again.extents[0].payload is loaded.extents[1].payload

    def test_what_was_loaded_is_saved_on(self) -> None:
        one, other = self.new_handles()
        shared = sample_payload(97)
        one.save(KEY, sample_checkpoint([shared]))
        before = one.stats().stored_bytes
        loaded = other.load(KEY)
        assert loaded is not None
        later = replace(KEY, version="version-2")
        other.save(later, loaded)
        assert other.stats().stored_bytes - before < shared.nbytes / 2
        assert_same(loaded, one.load(later))

    def test_layers_arrive_in_order(self) -> None:
        writer, reader = self.new_handles()
        checkpoint = sample_checkpoint([sample_payload(97), sample_payload(33, 1)])
        writer.save(KEY, checkpoint)
        loading = reader.open(KEY)
        assert loading is not None
        for layers in (1, 2):
            loading.wait(layers)
            for ours, theirs in zip(checkpoint.extents, loading.checkpoint.extents, strict=True):
                for name, tensor in ours.payload.tensors.items():
                    pair = (tensor[:layers], theirs.payload.tensors[name][:layers])
                    assert torch.equal(*(t.contiguous().view(torch.uint8) for t in pair))
        loading.wait()
        assert_same(checkpoint, loading.checkpoint)

    def test_versions_are_listed_by_thread(self) -> None:
        writer, reader = self.new_handles()
        keys = [replace(KEY, version=f"version-{number}") for number in range(3)]
        others = [
            replace(KEY, fingerprint="model-2"),
            replace(KEY, tenant="other"),
            replace(KEY, thread="other"),
            replace(KEY, namespace="subagent"),
        ]
        for number, key in enumerate(keys + others):
            writer.save(key, sample_checkpoint([sample_payload(3, number)]))
        assert set(reader.versions("model-1", "tenant", "thread", "")) == set(keys)
        assert reader.versions("model-1", "tenant", "thread", "subagent") == [others[3]]
        assert reader.versions("model-1", "nobody", "thread", "") == []
        assert set(reader.versions(None, "tenant", "thread", "")) == {*keys, others[0]}

    def test_deleting_forgets(self) -> None:
        """After an edit marked `forget` no stored byte may be of the forgotten rows."""
        writer, reader = self.new_handles()
        secret, clean = sample_payload(33, 1), sample_payload(33, 2)
        writer.save(KEY, sample_checkpoint([clean, secret]))
        # The rows of the secret lie in a payload that this version shares for other rows.
        mixed = Checkpoint(
            token_ids=np.arange(20),
            origins=np.zeros(20, np.int16),
            scores=np.zeros(20, np.float32),
            extents=(Extent(secret, 0, 20, 0),),
        )
        writer.save(replace(KEY, version="shares-secret"), mixed)
        kept = sample_checkpoint([clean])
        writer.save(replace(KEY, version="clean"), kept)
        writer.save(replace(KEY, thread="other"), sample_checkpoint([secret]))
        reader.delete(KEY)
        assert writer.load(KEY) is None
        assert writer.load(replace(KEY, version="shares-secret")) is None
        assert_same(kept, writer.load(replace(KEY, version="clean")))
        assert writer.load(replace(KEY, thread="other")) is not None
        writer.delete_thread("tenant", "other")
        assert writer.stats().stored_bytes < clean.nbytes + secret.nbytes / 2
        reader.delete(KEY)  # absent: no error

    def test_deleting_a_thread_leaves_nothing_of_it(self) -> None:
        writer, reader = self.new_handles()
        doomed = [
            KEY,
            replace(KEY, fingerprint="model-2"),
            replace(KEY, namespace="subagent"),
            replace(KEY, version="version-2"),
        ]
        kept = [replace(KEY, thread="other"), replace(KEY, tenant="other")]
        for number, key in enumerate(doomed + kept):
            writer.save(key, sample_checkpoint([sample_payload(33, number)]))
        reader.delete_thread("tenant", "thread")
        assert [writer.load(key) for key in doomed] == [None] * len(doomed)
        assert all(writer.load(key) is not None for key in kept)
        for key in kept:
            writer.delete_thread(key.tenant, key.thread)
        assert writer.stats().stored_bytes == 0
        reader.delete_thread("nobody", "nothing")  # absent: no error

    def test_loads_are_counted(self) -> None:
        store, _ = self.new_handles()
        store.load(KEY)
        store.save(KEY, sample_checkpoint([sample_payload(3)]))
        store.load(KEY)
        stats = store.stats()
        assert (stats.checkpoints, stats.hits, stats.misses) == (1, 1, 1)
        assert stats.stored_bytes > 0

    def test_concurrent_saves_of_one_key_leave_one_of_them(self) -> None:
        handles = self.new_handles()
        shared = sample_payload(97)
        samples = [sample_checkpoint([shared, sample_payload(33, n)], n) for n in range(4)]
        errors: list[Exception] = []

        def save(number: int) -> None:
            try:
                for _ in range(3):
                    handles[number % 2].save(KEY, samples[number])
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        loaded = handles[0].load(KEY)
        assert loaded is not None
        (same,) = [s for s in samples if np.array_equal(s.token_ids, loaded.token_ids)]
        assert_same(same, loaded)
        assert handles[1].stats().checkpoints == 1
