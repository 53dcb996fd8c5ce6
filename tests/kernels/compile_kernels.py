"""Compiles every Triton kernel for a GPU that need not be there, and reads what it would occupy.

    python compile_kernels.py ARCH CASES      (80 or 90; few or all)

The kernels' own launchers run on CPU tensors with the launch itself replaced, so that signatures,
compile-time arguments and specialisations are those of real launches. Prints one JSON line per
kernel: name, case, registers, stack bytes (spills and local arrays), shared bytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from patchkv_kernels import (
    Rope,
    RopeLayout,
    triton_attention_mass,
    triton_dequantize,
    triton_quantize,
)
from patchkv_kernels.payload import Payload, PayloadFormat
from patchkv_kernels.row_moves import RowMoves, rotation_table

K8V4, K4V4 = PayloadFormat.K8V4, PayloadFormat.K4V4

DUMPER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
KERNELS = (
    triton_attention_mass.row_lse_kernel,
    triton_attention_mass.received_mass_kernel,
    triton_attention_mass.block_mass_kernel,
    triton_quantize.gather_rows_kernel,
    triton_dequantize.scatter_rows_kernel,
)


def source_of(kernel: Any, arguments: dict[str, Any]) -> ASTSource:
    """What a launch with these arguments compiles: types, constants and divisibility by 16."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes = {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = mangle_type(value)
            aligned = value.data_ptr() % 16 == 0
            divisible = aligned and not parameter.do_not_specialize_on_alignment
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            divisible = special and value % 16 == 0
        if divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = subprocess.run(
            [DUMPER, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", dump))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


class Recorder:
    """Stands in for the launch of the kernels and compiles what would have been launched."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.case = ""
        self.seen: set[str] = set()
        for kernel in KERNELS:
            kernel.run = self._launcher(kernel)

    def _launcher(self, kernel: Any) -> Any:
        def run(*args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
            names = [parameter.name for parameter in kernel.params]
            arguments = dict(zip(names, args, strict=False))
            arguments |= {name: value for name, value in kwargs.items() if name in names}
            options = {name: value for name, value in kwargs.items() if name not in names}
            source = source_of(kernel, arguments)
            if source.hash() in self.seen:
                return
            self.seen.add(source.hash())
            compiled = triton.compile(source, target=self.target, options=options)
            registers, stack = resources(compiled.asm["cubin"])
            line = {
                "kernel": kernel.__name__,
                "case": self.case,
                "registers": registers,
                "stack": stack,
                "shared": compiled.metadata.shared,
            }
            print(json.dumps(line), flush=True)

        return run


def attention_cases(cases: str) -> Iterator[tuple[str, Any]]:
    """Heads of 24 give strides that are not divisible by 16, and so no vector loads."""
    forms = [(torch.bfloat16, 24), (torch.bfloat16, 128), (torch.float32, 128)]
    for dtype, head_dim in forms if cases == "all" else forms[:1]:
        yield f"attention {dtype} {head_dim}", partial(launch_attention, cases, dtype, head_dim)


def launch_attention(cases: str, dtype: torch.dtype, head_dim: int) -> None:
    query = torch.zeros(8, 64, head_dim, dtype=dtype)
    key = torch.zeros(2, 4096, head_dim, dtype=dtype)
    triton_attention_mass.add_received_mass_triton(torch.zeros(4096), query, key)
    for block_size in (32, 64) if cases == "all" else (64,):
        triton_attention_mass.add_block_mass_triton(
            torch.zeros(128, 128), query, key, block_size=block_size
        )


def row_cases(cases: str) -> Iterator[tuple[str, Any]]:
    """Both directions over formats, dtypes and layouts; heads of 128 fill a tile."""
    half, interleaved = RopeLayout.HALF_SPLIT, RopeLayout.INTERLEAVED
    bf16, fp32 = torch.bfloat16, torch.float32
    kept = [format for format in PayloadFormat if cases == "all" or format is not K4V4]
    forms = [(format, bf16, 128, 128, half) for format in kept]
    if cases == "all":
        forms += [(format, bf16, 128, 64, interleaved) for format in (PayloadFormat.NATIVE, K8V4)]
        forms += [(format, fp32, 72, 72, half) for format in (PayloadFormat.NATIVE, K8V4)]
        forms += [(format, bf16, 256, 256, half) for format in (PayloadFormat.NATIVE, K8V4)]
    for format, dtype, head_dim, rotary_dim, layout in forms:
        case = f"{format.value} {dtype} {head_dim} {rotary_dim} {layout.value}"
        yield case, partial(launch_rows, format, dtype, head_dim, rotary_dim, layout)


def launch_rows(
    format: PayloadFormat, dtype: torch.dtype, head_dim: int, rotary_dim: int, layout: RopeLayout
) -> None:
    keys = torch.zeros(2, 2, 4096, head_dim, dtype=dtype)
    rows = torch.arange(64)
    rope = Rope(np.ones(rotary_dim // 2, dtype=np.float32), layout)
    rotation = key_channels = None
    if format.is_quantised:
        rotation = rotation_table(rope, rows.numpy(), np.zeros(64, np.int64), keys.device)
        key_channels = torch.ones(2, 2, 2, head_dim, dtype=torch.float16)
    encoded = triton_quantize.gather_rows_triton(
        keys,
        keys,
        rows,
        format=format,
        float_dtypes=(dtype, dtype),
        rotation=rotation,
        layout=layout,
        key_channels=key_channels,
    )
    payload = Payload(
        format,
        encoded["keys"],
        encoded["values"],
        np.array([0, 64]),
        np.array([0]),
        key_scales=encoded.get("key_scales"),
        value_scales=encoded.get("value_scales"),
        key_channels=key_channels,
    )
    shifts = (0, 5) if format is PayloadFormat.NATIVE else (5,)
    for shift in shifts:
        moves = RowMoves.prepare(
            payload, rows.numpy(), rows.numpy(), rows.numpy() + shift, rope=rope, device=keys.device
        )
        triton_dequantize.scatter_rows_triton(payload, moves, keys, keys)


def main() -> None:
    architecture, cases = sys.argv[1:]
    recorder = Recorder(GPUTarget("cuda", int(architecture), 32))
    for recorder.case, run in (*attention_cases(cases), *row_cases(cases)):
        run()


if __name__ == "__main__":
    main()
