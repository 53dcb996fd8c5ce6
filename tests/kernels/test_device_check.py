"""The device check in small on the CPU, and what it says where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from patchkv_kernels.device_check import main
from patchkv_kernels.device_figures import Figure, report, table

OPTIONAL = (
    "accelerate",
    "sklearn",
    "scipy",
    "typer",
    "rich",
    "tiktoken",
    "langgraph",
    "langchain_core",
    "obstore",
    "redis",
    "gguf",
)
BARE = f"""
import runpy, sys
module = sys.argv[1]
for name in {OPTIONAL}:
    sys.modules[name] = None  # importing it fails
sys.argv[1:] = ["--cpu", "--tokens", "160", "--json", sys.argv[2]]
runpy.run_module(module, run_name="__main__")
"""


def run_bare(module: str, report: Path) -> list[dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, "-c", BARE, module, str(report)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    document = json.loads(report.read_text())
    assert document["passed"] and document["device"].startswith("CPU")
    figures: list[dict[str, Any]] = document["figures"]
    for figure in figures:
        assert figure["value"] >= 0 and figure["name"] in run.stdout
    return figures


def test_the_check_runs_in_small_without_optional_packages(tmp_path):
    pytest.importorskip("triton")
    figures = run_bare("patchkv_kernels.device_check", tmp_path / "report.json")
    assert {figure["part"] for figure in figures} == {
        "quantize_gather",
        "dequantize_scatter",
        "attention mass",
        "rate",
        "transfer",
    }
    assert sum(figure["passed"] is not None for figure in figures) >= 20


def test_the_resume_runs_in_small_without_optional_packages(tmp_path):
    figures = run_bare("patchkv_evals.device_resume", tmp_path / "report.json")
    faster = [figure for figure in figures if figure["name"].startswith("faster than")]
    assert {figure["name"].partition(": ")[2] for figure in faster} == {
        "PatchKV, lossless",
        "PatchKV, mixed precision",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main([]) == 2
    assert "--cpu" in capsys.readouterr().err


def test_a_failed_check_fails_the_whole(capsys, tmp_path):
    file = tmp_path / "report.json"
    figures = [Figure("a", "right", 0.0, "of bytes", True), Figure("b", "wrong", 0.5, "", False)]
    assert report(figures, device="a device", file=file) == 1
    assert "1 of 2 checks failed" in capsys.readouterr().out
    assert json.loads(file.read_text())["passed"] is False


def test_table_shows_units_verdicts_and_notes():
    lines = table(
        [
            Figure("rate", "copy", 1234.5678, "GB/s", note="of 4,000"),
            Figure("rows", "k8v4", 0.25, "of bytes", False),
        ]
    ).splitlines()
    assert lines == [
        "rate  copy  1,235 GB/s             of 4,000",
        "rows  k8v4  0.25 of bytes  FAILED",
    ]
