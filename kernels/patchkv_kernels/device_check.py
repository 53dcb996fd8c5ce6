"""Checks and measures every kernel on the GPU of this machine.

    python -m patchkv_kernels.device_check [--json FILE] [--tokens N]
    python -m patchkv_kernels.device_check --cpu      (all of it in small, without a GPU)

Takes under four minutes on one GPU, and needs torch, triton and numpy. With `--cpu` the kernels
run in Triton's interpreter and the rates are those of the CPU paths; that tests the check and not
a device. Exit status: 0 all is right, 1 something is not, 2 there is no GPU.
`python -m patchkv_evals.device_resume` measures a whole resume in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from patchkv_kernels.device_figures import run_check

if TYPE_CHECKING:
    import torch

    from patchkv_kernels.device_figures import Figure


def figures_of(device: torch.device, tokens: int) -> Iterator[Figure]:
    """All parts of the check, in order; sizes follow the device."""
    import torch

    from patchkv_kernels import device_kernels
    from patchkv_kernels.rotary import RopeLayout

    on_gpu = device.type == "cuda"
    if find_spec("triton"):
        yield from device_kernels.check_rows(device, tokens=423 if on_gpu else 40)
        yield from device_kernels.check_attention(device, tokens=4001 if on_gpu else 97)
    layers, kv_heads, head_dim, dtype = (
        (8, 8, 128, torch.bfloat16) if on_gpu else (2, 2, 16, torch.float32)
    )
    form = device_kernels.Form(layers, kv_heads, head_dim, head_dim, RopeLayout.HALF_SPLIT, dtype)
    yield from device_kernels.measure_rows(device, form, tokens=tokens)
    yield from device_kernels.measure_attention(device, form, tokens=tokens)
    if on_gpu:
        yield from device_kernels.measure_transfers(device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the check; returns the exit status."""
    return run_check(arguments, "Check and measure every kernel on this machine's GPU.", figures_of)


if __name__ == "__main__":
    sys.exit(main())
