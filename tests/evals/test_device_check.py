"""The device check in small on the CPU, and what it says where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from patchkv_evals.device_check.check import main, report
from patchkv_evals.device_check.figures import Figure, table

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
for name in {OPTIONAL}:
    sys.modules[name] = None  # importing it fails
sys.argv[1:] = ["--cpu", "--tokens", "160", "--rounds", "1", "--json", sys.argv[1]]
runpy.run_module("patchkv_evals.device_check", run_name="__main__")
"""


def test_everything_runs_in_small_without_optional_packages(tmp_path):
    pytest.importorskip("triton")
    report = tmp_path / "report.json"
    run = subprocess.run(
        [sys.executable, "-c", BARE, str(report)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    document = json.loads(report.read_text())
    assert document["passed"] and document["device"].startswith("CPU")
    figures = document["figures"]
    assert {figure["part"] for figure in figures} == {
        "quantize_gather",
        "dequantize_scatter",
        "attention mass",
        "rate",
        "transfer",
        "resume",
    }
    assert all(figure["value"] >= 0 for figure in figures)
    checked = [figure for figure in figures if figure["passed"] is not None]
    assert len(checked) >= 20
    faster = [figure for figure in figures if figure["name"].startswith("faster than")]
    assert {figure["name"].partition(": ")[2] for figure in faster} == {
        "PatchKV, lossless",
        "PatchKV, mixed precision",
    }
    for figure in figures:
        assert figure["name"] in run.stdout


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
