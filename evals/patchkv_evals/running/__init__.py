"""Runs methods over edited episodes, keeps what they gave in files, and pools several runs.

rows = load_rows("hotpotqa.jsonl", "hotpotqa").rows
spec = RunSpec("hotpotqa", "smollm2", edits=("refresh", "flip"), limit=8)
outcome = run(engine, rows, [method("prefix_cache"), method("patchkv")], spec, "results/hotpot")
outcome.run.summary["methods"]["patchkv"]["f1"]
pool([read_run("results/hotpot"), read_run("results/trivia")])[0].methods["patchkv"].speedups
"""

from patchkv_evals.running.pooled import MethodFigures, Pooled, Target, pool
from patchkv_evals.running.results import Run, read_run
from patchkv_evals.running.runner import Outcome, run
from patchkv_evals.running.spec import ABLATIONS, FULL_PREFILL, MAIN_METHODS, RunSpec

__all__ = [
    "ABLATIONS",
    "FULL_PREFILL",
    "MAIN_METHODS",
    "MethodFigures",
    "Outcome",
    "Pooled",
    "Run",
    "RunSpec",
    "Target",
    "pool",
    "read_run",
    "run",
]
