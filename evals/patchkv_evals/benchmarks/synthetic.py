"""Rows and token ids without a model: what storage, restore and planning cost depends on sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from patchkv_agents.checkpoint import Checkpoint
from patchkv_agents.checkpoint.extents import Extent, extents_of
from patchkv_agents.checkpoint.offload import BLOCK_SIZE
from patchkv_agents.errors import InputError
from patchkv_agents.ranges import IntArray
from patchkv_kernels import Rope, RopeLayout, quantize_gather
from patchkv_kernels.payload import PayloadFormat

VOCABULARY = 49_152

MIXES: dict[str, dict[PayloadFormat, float]] = {
    "native": {PayloadFormat.NATIVE: 1.0},
    "f16": {PayloadFormat.F16: 1.0},
    "k8v8": {PayloadFormat.K8V8: 1.0},
    "k8v4": {PayloadFormat.K8V4: 1.0},
    "k4v4": {PayloadFormat.K4V4: 1.0},
    "mixed": {PayloadFormat.F16: 0.02, PayloadFormat.K8V8: 0.1, PayloadFormat.K8V4: 0.88},
}
"""Share of the blocks in each format; mixed about as the default policy stores text."""


DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RowShape:
    """The size of a model's rows, and where they go; the embedded model's on the CPU unless given.

    Raises:
        InputError: there is no such dtype or device, or the stored formats do not hold such rows.
    """

    layers: int = 30
    kv_heads: int = 3
    head_dim: int = 64
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"there is no dtype '{self.dtype}': use one of {', '.join(DTYPES)}")
        if self.head_dim % 8:
            raise InputError(f"head_dim is {self.head_dim}: use a multiple of 8")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise InputError(f"there is no device '{self.device}' here: use another") from error

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the model's rows."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def bytes_16(self) -> int:
        """Bytes of a token's keys and values in 16 bits."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    @property
    def rope(self) -> Rope:
        """Plain rotary positions for these heads."""
        inv_freq = 100_000.0 ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        return Rope(inv_freq.astype(np.float32), RopeLayout.HALF_SPLIT)

    def random_rows(self, tokens: int) -> torch.Tensor:
        """Keys or values, `[layers, kv_heads, tokens, head_dim]`; the same for equal arguments."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.layers, self.kv_heads, tokens, self.head_dim)
        return torch.randn(shape, generator=generator).to(self.device, self.torch_dtype)


def checkpoint_of(mix: Mapping[PayloadFormat, float], tokens: int, shape: RowShape) -> Checkpoint:
    """A checkpoint of random rows, its blocks in the formats of `mix`."""
    keys = shape.random_rows(tokens)
    values = keys.flip(2)
    blocks = block_ranges(tokens)
    rng = np.random.default_rng(0)
    chosen = rng.choice(len(mix), size=len(blocks), p=list(mix.values()))
    extents: list[Extent] = []
    for number, format in enumerate(mix):
        ranges = [block for block, own in zip(blocks, chosen, strict=True) if own == number]
        if ranges:
            payload = quantize_gather(keys, values, ranges, format=format, rope=shape.rope)
            extents += extents_of(payload, [start for start, _, _ in ranges])
    return Checkpoint(
        token_ids=text_like_ids(tokens),
        origins=np.zeros(tokens, np.int16),
        scores=np.full(tokens, 1 / tokens, np.float32),
    ).with_extents(extents)


def block_ranges(tokens: int) -> list[tuple[int, int, int]]:
    """All blocks of a context, as `quantize_gather` takes them: start, stop, position."""
    starts = range(0, tokens, BLOCK_SIZE)
    return [(start, min(start + BLOCK_SIZE, tokens), start) for start in starts]


def text_like_ids(tokens: int, *, seed: int = 0) -> IntArray:
    """Token ids of which few are frequent and many rare (Zipf's law), int64 `[tokens]`."""
    ranks = np.random.default_rng(seed).zipf(1.2, tokens)
    ids: IntArray = ranks.astype(np.int64) % VOCABULARY
    return ids


def with_hunks(ids: IntArray, hunks: int, *, size: int = 64, seed: int = 1) -> IntArray:
    """`ids` with `hunks` spans replaced by new ones of about `size` tokens, evenly spread.

    Args:
        ids: int64 `[tokens]`; not changed.
        hunks: how many; the first one lies where one fifth of the context is in front of it.
        size: of a new span; shorter where there is no room.
        seed: of the new tokens.
    """
    starts = np.linspace(len(ids) // 5, len(ids), hunks, endpoint=False).astype(int)
    room = max(1, min(size, (len(ids) - len(ids) // 5) // (2 * hunks)))
    fresh = text_like_ids(hunks * room, seed=seed).reshape(hunks, room)
    pieces, cursor = [], 0
    for start, span in zip(starts.tolist(), fresh, strict=True):
        pieces += [ids[cursor:start], span]
        cursor = start + room - room // 8  # the old span was a little shorter
    return np.concatenate([*pieces, ids[cursor:]])
