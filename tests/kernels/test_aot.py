"""Every kernel compiles for the GPUs it is made for, and keeps all it holds in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("compile_kernels.py")
ARCHITECTURES = (80, 90)
KERNELS = {
    "row_lse_kernel",
    "received_mass_kernel",
    "block_mass_kernel",
    "gather_rows_kernel",
    "scatter_rows_kernel",
}


def compiled(folder, cases):
    """What `compile_kernels.py` prints for each architecture; the two run side by side.

    In processes of their own: in this one Triton interprets. The cache is empty at first, so that
    today's source and compiler are judged.
    """
    processes = {}
    for architecture in ARCHITECTURES:
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(folder / str(architecture)),
        }
        processes[architecture] = subprocess.Popen(
            [sys.executable, SCRIPT, str(architecture), cases],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    lines = {}
    for architecture, process in processes.items():
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        lines[architecture] = [json.loads(line) for line in output.splitlines()]
    return lines


def check(lines):
    for architecture in ARCHITECTURES:
        assert {line["kernel"] for line in lines[architecture]} == KERNELS
        for line in lines[architecture]:
            assert line["stack"] == 0, f"sm_{architecture}: registers spill in {line}"
            assert 16 <= line["registers"] <= 255
            assert line["shared"] <= 48 * 1024


def test_nothing_spills(tmp_path):
    """All formats in bfloat16 with heads of 128; attention without vector loads, the fullest."""
    check(compiled(tmp_path, "few"))


@pytest.mark.slow
def test_nothing_spills_in_any_format_and_layout(tmp_path):
    check(compiled(tmp_path, "all"))
