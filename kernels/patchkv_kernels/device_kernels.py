"""Device check of the kernels: correctness against the torch paths, and throughput."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from patchkv_kernels.attention_mass import (
    add_block_mass,
    add_block_mass_torch,
    add_received_mass,
    add_received_mass_torch,
)
from patchkv_kernels.device_figures import Figure, median_ms
from patchkv_kernels.gather import gather_rows_torch, quantize_gather
from patchkv_kernels.payload import Payload, PayloadFormat
from patchkv_kernels.rotary import Rope, RopeLayout
from patchkv_kernels.row_moves import RowMoves, rotation_table
from patchkv_kernels.scatter import scatter_rows, scatter_rows_cpu

CPU = torch.device("cpu")
MAX_DIFFERENT = 1e-3
"""Share of key bytes that may differ: a fused product in torch can change how a value rounds."""


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and dtype of a cache."""

    layers: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    layout: RopeLayout
    dtype: torch.dtype

    @property
    def rope(self) -> Rope:
        """With base 10,000."""
        half = self.rotary_dim // 2
        return Rope((1e4 ** -(np.arange(half) / half)).astype(np.float32), self.layout)

    def cache(self, capacity: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Random keys and values, the same on every device."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.layers, self.kv_heads, capacity, self.head_dim)
        spread = torch.randn(self.head_dim, generator=generator).exp()
        keys = torch.randn(shape, generator=generator) * spread + spread
        values = torch.randn(shape, generator=generator)
        return keys.to(device, self.dtype), values.to(device, self.dtype)

    def stored_dtypes(self, format: PayloadFormat) -> tuple[torch.dtype, torch.dtype]:
        """Of keys and values where they stay floating point."""
        narrow = format is PayloadFormat.F16 and self.dtype == torch.float32
        return (torch.float16,) * 2 if narrow else (self.dtype,) * 2


CHECKED = (
    Form(2, 3, 64, 64, RopeLayout.HALF_SPLIT, torch.float32),
    Form(2, 8, 128, 128, RopeLayout.HALF_SPLIT, torch.bfloat16),
    Form(2, 2, 128, 64, RopeLayout.INTERLEAVED, torch.bfloat16),
    Form(1, 1, 80, 40, RopeLayout.HALF_SPLIT, torch.float16),
)
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def staged(payload: Payload, device: torch.device) -> Payload:
    """The payload with its tensors on the device; copies are queued, not waited for."""
    tensors = {
        name: tensor.to(device, non_blocking=True) for name, tensor in payload.tensors.items()
    }
    return replace(payload, **tensors)  # type: ignore[arg-type]


def check_rows(device: torch.device, *, tokens: int) -> Iterator[Figure]:
    """Compare both directions in all formats with the torch paths on the CPU."""
    for form in CHECKED if device.type == "cuda" else CHECKED[-2:]:
        keys, values = form.cache(tokens, CPU)
        for format in PayloadFormat:
            name = f"{format.value} {_name(form.dtype)} {form.layout.value} {form.head_dim}"
            error = _gather_error(form, keys, values, format, device)
            yield Figure("quantize_gather", name, error, "of bytes", error <= MAX_DIFFERENT)
            error = _scatter_error(form, keys, values, format, device)
            limit = TOLERANCE[form.dtype]
            yield Figure("dequantize_scatter", name, error, "relative RMS", error <= limit)


def _gather_error(
    form: Form,
    keys: torch.Tensor,
    values: torch.Tensor,
    format: PayloadFormat,
    device: torch.device,
) -> float:
    """Share of the bytes in which the kernel's payload differs from the torch path's."""
    from patchkv_kernels.triton_quantize import gather_rows_triton

    rows = torch.arange(3, keys.shape[2] - 2)
    channels = torch.stack([keys[:, :, 0], keys[:, :, 1].abs() + 0.5], dim=2).half()

    def encoded(gather: Callable[..., dict[str, torch.Tensor]], place: torch.device) -> Any:
        rotation = key_channels = None
        if format.is_quantised:
            written = rows.numpy() + 100
            rotation = rotation_table(form.rope, written, np.zeros_like(written), place)
            key_channels = channels.to(place)
        return gather(
            keys.to(place),
            values.to(place),
            rows.to(place),
            format=format,
            float_dtypes=form.stored_dtypes(format),
            rotation=rotation,
            layout=form.layout,
            key_channels=key_channels,
        )

    expected, actual = encoded(gather_rows_torch, CPU), encoded(gather_rows_triton, device)
    return max(_different(actual[name], tensor) for name, tensor in expected.items())


def _scatter_error(
    form: Form,
    keys: torch.Tensor,
    values: torch.Tensor,
    format: PayloadFormat,
    device: torch.device,
) -> float:
    """Relative error of the kernel's rows, in shuffled slots of a cache full of NaN."""
    from patchkv_kernels.triton_dequantize import scatter_rows_triton

    tokens = keys.shape[2]
    payload = quantize_gather(keys, values, [(3, tokens - 2, 100)], format=format, rope=form.rope)
    rows = np.flatnonzero(np.arange(payload.rows) % 7 != 3)
    slots = np.random.default_rng(0).permutation(2 * tokens)[: len(rows)]

    def restored(scatter: Callable[..., None], place: torch.device) -> list[torch.Tensor]:
        moves = RowMoves.prepare(payload, rows, slots, rows + 105, rope=form.rope, device=place)
        shape = (form.layers, form.kv_heads, 2 * tokens, form.head_dim)
        caches = [torch.full(shape, torch.nan, dtype=form.dtype, device=place) for _ in range(2)]
        scatter(staged(payload, place), moves, *caches)
        return [cache.cpu() for cache in caches]

    expected, actual = restored(scatter_rows_cpu, CPU), restored(scatter_rows_triton, device)
    return max(_error(a, e) for a, e in zip(actual, expected, strict=True))


def check_attention(device: torch.device, *, tokens: int) -> Iterator[Figure]:
    """Compare both sums of attention with torch in float32."""
    from patchkv_kernels.triton_attention_mass import (
        add_block_mass_triton,
        add_received_mass_triton,
    )

    # The interpreter multiplies bfloat16 as integers.
    dtypes = (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    for dtype in dtypes:
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(8, 33, 128, generator=generator).to(device, dtype)
        key = torch.randn(2, tokens, 128, generator=generator).to(device, dtype)
        blocks = -(-tokens // 32)
        for name, kernel, reference, shape in (
            ("received", add_received_mass_triton, add_received_mass_torch, (tokens,)),
            (
                "blocks of 32",
                partial(add_block_mass_triton, block_size=32),
                partial(add_block_mass_torch, block_size=32),
                (blocks, blocks),
            ),
        ):
            actual, expected = (torch.zeros(shape, device=device) for _ in range(2))
            kernel(actual, query, key)
            reference(expected, query.float(), key.float())
            error = _error(actual, expected)
            yield Figure(
                "attention mass", f"{name} {_name(dtype)}", error, "relative RMS", error <= 1e-4
            )


def measure_rows(device: torch.device, form: Form, *, tokens: int) -> Iterator[Figure]:
    """Throughput of both directions, beside a plain copy of as many bytes."""
    keys, values = form.cache(tokens, device)
    native = 2 * keys.nbytes
    copy_ms = median_ms(partial(torch.empty_like(keys).copy_, keys), device)
    yield Figure("rate", "copy on the device", 2 * keys.nbytes / copy_ms / 1e6, "GB/s")
    index = np.arange(tokens)
    for format in (PayloadFormat.NATIVE, PayloadFormat.K8V8, PayloadFormat.K8V4):
        encode = partial(
            quantize_gather, keys, values, [(0, tokens, 0)], format=format, rope=form.rope
        )
        payload = encode()
        moves = RowMoves.prepare(payload, index, index, index + 5, rope=form.rope, device=device)
        resident = staged(payload, device)

        def rate(ms: float, payload: Payload = payload) -> float:
            return (payload.nbytes + native) / ms / 1e6

        def fetch(payload: Payload = payload, moves: RowMoves = moves) -> None:
            scatter_rows(staged(payload, device), moves, keys, values)

        ms = median_ms(partial(scatter_rows, resident, moves, keys, values), device)
        yield Figure("rate", f"dequantize_scatter {format.value}", rate(ms), "GB/s")
        encode_here = _encoder(form, keys, values, resident)
        ms = median_ms(encode_here, device)
        yield Figure("rate", f"quantize_gather {format.value}", rate(ms), "GB/s")
        note = f"{payload.nbytes / 1e6:,.1f} MB, {payload.nbytes / native:.1%} of the rows written"
        ms = median_ms(fetch, device)
        yield Figure("transfer", f"fetch and scatter {format.value}", ms, "ms", note=note)
        ms = median_ms(encode, device, rounds=3)
        yield Figure("transfer", f"gather and offload {format.value}", ms, "ms")


def _encoder(
    form: Form, keys: torch.Tensor, values: torch.Tensor, payload: Payload
) -> Callable[[], object]:
    """Encodes the rows as `payload` holds them, without moving them off the device."""
    if keys.is_cuda:
        from patchkv_kernels.triton_quantize import gather_rows_triton as gather
    else:
        gather = gather_rows_torch
    written = np.arange(keys.shape[2])
    return partial(
        gather,
        keys,
        values,
        torch.arange(keys.shape[2], device=keys.device),
        format=payload.format,
        float_dtypes=form.stored_dtypes(payload.format),
        rotation=rotation_table(form.rope, written, np.zeros_like(written), keys.device)
        if payload.format.is_quantised
        else None,
        layout=form.layout,
        key_channels=payload.key_channels,
    )


def measure_attention(device: torch.device, form: Form, *, tokens: int) -> Iterator[Figure]:
    """Time of both sums of attention for one layer, 32 prompt rows and one chunk of a prefill."""
    heads = 4 * form.kv_heads
    key = form.cache(tokens, device)[0][0]
    few, many = (
        torch.randn(heads, min(rows, tokens), form.head_dim, device=device).to(form.dtype)
        for rows in (32, 512)
    )
    mass = torch.zeros(tokens, device=device)
    blocks = -(-tokens // 32)
    block_mass = torch.zeros(blocks, blocks, device=device)
    for name, work in (
        ("received", partial(add_received_mass, mass, few, key)),
        ("received, torch", partial(add_received_mass_torch, mass, few, key)),
        ("blocks", partial(add_block_mass, block_mass, many, key, block_size=32)),
        ("blocks, torch", partial(add_block_mass_torch, block_mass, many, key, block_size=32)),
    ):
        yield Figure("attention mass", name, median_ms(work, device), "ms a layer")


def measure_transfers(device: torch.device, *, megabytes: int = 256) -> Iterator[Figure]:
    """Throughput of host-to-device copies from pageable and from pinned memory."""
    target = torch.empty(megabytes << 20, dtype=torch.uint8, device=device)
    source = torch.ones(megabytes << 20, dtype=torch.uint8)
    for name, host in (("pageable", source), ("pinned", source.pin_memory())):
        ms = median_ms(partial(target.copy_, host, non_blocking=True), device)
        yield Figure("host to device", name, megabytes / 1024 / (ms / 1e3), "GiB/s")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _different(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of the bytes that differ."""
    left, right = (t.contiguous().view(torch.uint8) for t in (actual.cpu(), expected))
    return float((left != right).float().mean())


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative root mean square of the difference; infinite if NaN are not in the same places."""
    if not torch.equal(actual.isnan(), expected.isnan()):
        return float("inf")
    known = ~expected.isnan()
    left, right = actual[known].double(), expected[known].double()
    return float((left - right).norm() / right.norm())
