"""Checks and measures every kernel, and a whole resume, on the GPU of this machine.

    python -m patchkv_evals.device_check [--json FILE] [--tokens N] [--rounds N]
    python -m patchkv_evals.device_check --cpu      (all of it in small, without a GPU)

Takes under four minutes on one GPU, and needs torch, triton, transformers and numpy. With `--cpu`
the kernels run in Triton's interpreter and the rates are those of the CPU paths; that tests the
check and not a device. Exit status: 0 all is right, 1 something is not, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from patchkv_evals.device_check.figures import Figure


def figures_of(device: torch.device, *, tokens: int, rounds: int) -> Iterator[Figure]:
    """All parts of the check, in order; sizes follow the device."""
    from patchkv_evals.device_check import kernels, resume
    from patchkv_kernels.rotary import RopeLayout

    on_gpu = device.type == "cuda"
    if find_spec("triton"):
        yield from kernels.check_rows(device, tokens=423 if on_gpu else 40)
        yield from kernels.check_attention(device, tokens=4001 if on_gpu else 97)
    shape = resume.QWEN3_8B if on_gpu else resume.TINY
    form = kernels.Form(
        8 if on_gpu else 2,
        shape.kv_heads,
        shape.head_dim,
        shape.head_dim,
        RopeLayout.HALF_SPLIT,
        shape.dtype,
    )
    yield from kernels.measure_rows(device, form, tokens=tokens)
    yield from kernels.measure_attention(device, form, tokens=tokens)
    if on_gpu:
        yield from kernels.measure_transfers(device)
    yield from resume.measure_resume(device, shape, tokens=tokens, rounds=rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the check; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="everything in small on the CPU")
    parser.add_argument("--tokens", type=int, help="of the context; 10,000 on a GPU, 600 else")
    parser.add_argument("--rounds", type=int, default=3, help="of the resume")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    if options.cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    import torch

    if not options.cpu and not torch.cuda.is_available():
        print(
            "torch finds no CUDA GPU here. Run this on a machine with one (and torch's CUDA build),"
            " or try the check itself in small with --cpu.",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu" if options.cpu else "cuda")
    tokens = options.tokens or (600 if options.cpu else 10_000)
    name = "CPU, kernels interpreted" if options.cpu else torch.cuda.get_device_name()
    figures = figures_of(device, tokens=tokens, rounds=options.rounds)
    return report(figures, device=name, file=options.json)


def report(figures: Iterable[Figure], *, device: str, file: Path | None = None) -> int:
    """Print the figures as they come and their table, write the file; returns the exit status."""
    import torch

    from patchkv_evals.device_check.figures import table

    started = time.perf_counter()
    measured = []
    for figure in figures:
        measured.append(figure)
        elapsed = f"{time.perf_counter() - started:6.1f} s"
        print(f"{elapsed}  {figure.part}: {figure.name}", file=sys.stderr, flush=True)
    print(f"{device}, torch {torch.__version__}\n\n{table(measured)}")
    failed = [figure for figure in measured if figure.passed is False]
    if file is not None:
        document = {
            "device": device,
            "torch": torch.__version__,
            "seconds": time.perf_counter() - started,
            "passed": not failed,
            "figures": [figure.to_dict() for figure in measured],
        }
        file.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\n{len(failed)} of {sum(f.passed is not None for f in measured)} checks failed")
    return 1 if failed else 0
