"""Result folders as `patchkv eval` and `patchkv bench` write them, with invented figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchkv_evals.running.results import ResultsFolder

MAIN = (
    "full_prefill",
    "prefix_cache",
    "direct_reuse",
    "cacheblend",
    "cacheblend_released",
    "patchkv_published",
    "patchkv",
)
ABLATIONS = (
    "patchkv_attention",
    "patchkv_no_window",
    "patchkv_no_tail",
    "patchkv_contiguous",
    "patchkv_fp16",
    "patchkv_int8",
    "patchkv_int4",
)
# Time to first token in ms at 2,000 tokens, KL, share of other answers, rows, payload of 16 bits.
FIGURES: dict[str, tuple[float, float, float, float, float | None]] = {
    "full_prefill": (2900, 0.0, 0.0, 1.0, None),
    "prefix_cache": (2350, 2e-8, 0.0, 1.0, 1.0),
    "direct_reuse": (180, 0.02, 0.25, 0.03, 1.0),
    "cacheblend": (760, 0.004, 0.1, 0.25, 1.0),
    "cacheblend_released": (770, 0.05, 0.3, 0.25, 1.0),
    "patchkv_published": (390, 0.003, 0.1, 0.1, 0.44),
    "patchkv": (450, 4e-4, 0.03, 0.13, 0.44),
    "patchkv_attention": (420, 6e-4, 0.03, 0.11, 0.44),
    "patchkv_no_window": (380, 2e-3, 0.06, 0.08, 0.44),
    "patchkv_no_tail": (390, 3e-3, 0.08, 0.1, 0.44),
    "patchkv_contiguous": (460, 1.5e-3, 0.05, 0.13, 0.44),
    "patchkv_fp16": (455, 3e-4, 0.03, 0.13, 1.0),
    "patchkv_int8": (448, 5e-4, 0.03, 0.13, 0.54),
    "patchkv_int4": (452, 3e-2, 0.2, 0.13, 0.29),
}
VERSIONS = {"patchkv_agents": "0.1.0", "python": "3.11", "torch": "2.13.0", "transformers": "5.24"}
MACHINE = {"cpu": "Intel Xeon", "threads": 2, "device": "cpu"}


def config(dataset: str = "hotpotqa", **changes: Any) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "schema": 1,
        "command": f"patchkv eval --dataset {dataset} --data {dataset}.jsonl --out {dataset}",
        "created": "2031-01-21T17:41:05Z",
        "dataset": dataset,
        "data": f"{dataset}.jsonl",
        "data_sha256": "ab" * 32,
        "edits": ["refresh", "flip", "summarize"],
        "methods": list(MAIN),
        "model": "smollm2",
        "fingerprint": "f1e2d3",
        "dtype": "float32",
        "limit": 8,
        "tokens": 2048,
        "position": 0.2,
        "seed": 0,
        "rounds": 1,
        "max_new_tokens": 24,
        "versions": VERSIONS,
        "machine": MACHINE,
        **changes,
    }


def records(
    dataset: str = "hotpotqa",
    *,
    methods: Sequence[str] = MAIN,
    edits: Sequence[str] = ("refresh", "flip", "summarize"),
    rows: int = 8,
    seed: int = 0,
    slower: float = 1.0,
) -> Iterable[dict[str, Any]]:
    """Lines of results.jsonl; the same seed gives the same."""
    rng = np.random.default_rng([seed, *dataset.encode()])
    for edit in edits:
        for number in range(rows):
            full_f1 = float(rng.choice([0.0, 0.0, 0.4, 0.67, 1.0, 1.0]))
            difficulty, length = rng.lognormal(0, 0.8), rng.lognormal(0, 0.05)
            for method in methods:
                ttft, kl, other, rows_run, payload = FIGURES[method]
                same = bool(rng.random() >= other)
                measured = kl * difficulty * rng.lognormal(0, 0.7)
                metrics = {
                    "f1": full_f1 if same else float(rng.choice([0.0, 0.5, full_f1])),
                    "em": float(full_f1 == 1.0 and same),
                    "first_token_kl": measured,
                    "top1_agree": measured < 0.05,
                    "exact_continuation": same,
                    "same_answer": same,
                    "stale_answer": (not same and rng.random() < 0.4) if edit == "flip" else None,
                    "answer_margin_recovery": float(1 - min(1, 20 * measured))
                    if edit == "flip"
                    else None,
                    "resume_ttft_ms": ttft * slower * length * rng.lognormal(0, 0.06),
                    "planning_ms": 3.0,
                    "recompute_ratio": rows_run,
                    "repair_ratio": 0.9 * rows_run,
                    "payload_bytes": None if payload is None else int(3.6e7 * payload),
                    "payload_ratio": payload,
                    "restore_ms": 40.0,
                    "store_ms": 55.0,
                }
                yield {
                    "episode": f"{dataset}-{number}:{edit}",
                    "row": f"{dataset}-{number}",
                    "edit": edit,
                    "method": method,
                    "dataset": dataset,
                    "step": 0,
                    "tokens_old": 2040,
                    "tokens_new": int(2048 * length),
                    "prediction": "Alda Borin" if same else "Farid Quist",
                    "answers": ["Alda Borin", "Engineer Borin"],
                    "stale_answers": ["Farid Quist"] if edit == "flip" else [],
                    "metrics": metrics,
                    "rounds_ms": [metrics["resume_ttft_ms"]],
                    "report": {},
                }


def write_run(
    folder: Path,
    lines: Iterable[dict[str, Any]],
    failures: Sequence[dict[str, Any]] = (),
    **changes: Any,
) -> Path:
    """A folder of `patchkv eval`."""
    results = ResultsFolder(folder, config(**changes))
    results.add(list(lines))
    results.add_failures(failures)
    results.write_summary()
    return folder


def write_bench(
    folder: Path, bench: str, points: Sequence[dict[str, Any]], *, variant: str = "", **others: Any
) -> Path:
    """A file of `patchkv bench`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"model": "smollm2", **({"sweep": variant} if variant else {})}
    path = folder / f"{'-'.join(filter(None, ('bench', bench, variant)))}.json"
    document = {
        "schema": 1,
        "bench": bench,
        "command": f"patchkv bench {bench} --out bench",
        "created": "2031-01-21T18:00:00Z",
        "config": settings,
        "versions": VERSIONS,
        "machine": MACHINE,
        "points": list(points),
        **others,
    }
    path.write_text(json.dumps(document))
    return path


def timing(name: str, ms: float, rng: np.random.Generator) -> dict[str, Any]:
    """A time and three rounds around it."""
    rounds = sorted(float(ms * factor) for factor in rng.lognormal(0, 0.06, 3))
    return {f"{name}_ms": rounds[1], f"{name}_rounds_ms": rounds}


def resume_points(sweep: str) -> list[dict[str, Any]]:
    """Points of one sweep of `patchkv bench resume`."""
    rng = np.random.default_rng(1)
    values: dict[str, Sequence[Any]] = {
        "length": (1000, 2000, 4000, 8000),
        "position": (0.1, 0.3, 0.5, 0.7, 0.9),
        "edit_size": (16, 64, 256, 1024),
        "attention": (0.0, 0.005, 0.01, 0.015, 0.03, 0.05),
        "block": (16, 32, 64, 128),
        "precision": ("fp16", "int8", "int4", "mixed"),
    }
    policy = sweep in ("attention", "block", "precision")
    points = []
    for value in (None, *values[sweep]) if policy else values[sweep]:
        for method in ("prefix_cache", "direct_reuse", "cacheblend", "patchkv"):
            if policy and (value is None) == (method == "patchkv"):
                continue
            tokens = value if sweep == "length" else 4000
            ttft, kl, _, rows_run, payload = FIGURES[method]
            grown = (tokens / 2000) ** {"prefix_cache": 1.55, "cacheblend": 1.4}.get(method, 0.8)
            if sweep == "attention" and value is not None:
                ttft, kl = ttft * (0.9 + 12 * value), kl * (1.5 - 15 * value)
            points.append(
                {
                    "sweep": sweep,
                    "value": value,
                    "method": method,
                    "tokens": tokens,
                    "tokens_old": tokens + 3,
                    "position": 0.2,
                    "edit_tokens": 67,
                    **timing("ttft", ttft * grown, rng),
                    "planning_ms": 2.0,
                    "restore_ms": 60.0,
                    "recompute_ms": 300.0,
                    "speedup": FIGURES["prefix_cache"][0] / ttft * (tokens / 2000) ** 0.6
                    if method != "prefix_cache"
                    else 1.0,
                    "recompute_ratio": rows_run,
                    "repair_ratio": rows_run,
                    "payload_bytes": 36_000_000,
                    "payload_ratio": None if method == "prefix_cache" else payload,
                    "first_token_kl": kl * rng.lognormal(0, 0.4),
                    "top1_agree": True,
                }
            )
    return points
