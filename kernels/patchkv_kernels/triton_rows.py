# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
"""Shared parts of the Triton kernels that read and write KV rows.

A tile is `[rows, DIMS]` with the channels of a head in their order, `DIMS` being the next power of
two from `head_dim` on. The other channel of each RoPE pair is taken from the same tile, so every
layout of pairs is one table of indices, and each element of a row is read from memory once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from patchkv_kernels.quantize import GROUP
from patchkv_kernels.rotary import RopeLayout

MAX_TILE_ROWS = 32
"""Largest number of rows per tile."""
TILE_ELEMENTS = 2048
"""Largest number of elements per tile: 16 rows of 128 channels. Twice as many halve occupancy."""
MIN_PROGRAMS = 2048
"""Heads are split over programs until there are this many, several for each of 132 SMs."""
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
"""Compiler options; without fusion, products are rounded as in the torch reference."""
UNSPECIALISED = ["moves", "count", "payload_rows", "kv_heads", "heads_per_program"]
UNALIGNED = ["rows", "slots", "cos", "sin", "moved", "key_scales", "value_scales"]
"""Arguments that change from call to call: a new value must not cause a recompilation."""


@triton.jit
def rotation_of(
    cos, sin, place, valid, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, DIMS: tl.constexpr
):
    """Cosine and signed sine of each channel, `[rows, DIMS]`: 1 and 0 behind `ROTARY_DIM`.

    The sine is negative for the first channel of a pair. `place` is the first entry of each row.
    """
    channel = tl.arange(0, DIMS)
    if INTERLEAVED:
        pair = channel // 2
        is_first = channel % 2 == 0
    else:
        pair = channel % (ROTARY_DIM // 2)
        is_first = channel < ROTARY_DIM // 2
    mask = valid[:, None] & (channel < ROTARY_DIM)[None, :]
    entry = place[:, None] + pair[None, :]
    c = tl.load(cos + entry, mask=mask, other=1.0)
    s = tl.load(sin + entry, mask=mask, other=0.0)
    return c, tl.where(is_first[None, :], -s, s)


@triton.jit
def rotated(
    x, cos, sin, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """Keys `[ROWS, DIMS]`, float32, turned by the angles of `rotation_of`."""
    channel = tl.arange(0, DIMS)
    if INTERLEAVED:
        other = channel ^ 1
    else:
        other = tl.where(
            channel < ROTARY_DIM // 2, channel + ROTARY_DIM // 2, channel - ROTARY_DIM // 2
        )
    other = tl.where(channel < ROTARY_DIM, other, channel)
    partner = tl.gather(x, tl.broadcast_to(other[None, :], [ROWS, DIMS]), 1)
    # A channel without rotation has sine 0, and 0 times an infinity would be NaN.
    return tl.where((channel < ROTARY_DIM)[None, :], x * cos + partner * sin, x)


def head_constants(head_dim: int, rotary_dim: int, layout: RopeLayout) -> dict[str, int | bool]:
    """Compile-time arguments that follow from the form of a head."""
    dims = max(GROUP, triton.next_power_of_2(head_dim))
    # Rows that are not known to be aligned are addressed element by element, in many registers.
    elements = TILE_ELEMENTS if head_dim % 16 == 0 else TILE_ELEMENTS // 2
    return {
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "INTERLEAVED": layout is RopeLayout.INTERLEAVED,
        "ROWS": max(1, min(MAX_TILE_ROWS, elements // dims)),
        "DIMS": dims,
        "GROUP": GROUP,
    }


def head_groups(kv_heads: int, other_programs: int) -> tuple[int, int]:
    """Into how many groups the heads are cut for a launch, and the heads of a group."""
    groups = min(kv_heads, triton.cdiv(MIN_PROGRAMS, max(1, other_programs)))
    size = triton.cdiv(kv_heads, groups)
    return triton.cdiv(kv_heads, size), size
