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


def drift_points() -> list[dict[str, Any]]:
    """Points of `patchkv bench drift`: decay with the distance."""
    rng = np.random.default_rng(2)
    points = []
    for context in range(4):
        for edit in ("refresh", "summarize"):
            for distance in range(context, 1800, 32):
                drift = (0.5 / (1 + distance / 60) + 0.02) * rng.lognormal(0, 0.35)
                points.append(
                    {
                        "context": f"row-{context}",
                        "edit": edit,
                        "distance": distance,
                        "tokens": 32,
                        "value_drift": drift,
                        "value_cosine": 1 - drift**2 / 2,
                        "key_drift": 0.7 * drift,
                        "key_cosine": 1 - 0.25 * drift**2,
                        "key_drift_unmoved": 0.7 + 0.1 * rng.random(),
                        "key_cosine_unmoved": 0.75,
                    }
                )
    return points


def selection_points() -> list[dict[str, Any]]:
    """Points of `patchkv bench selection`: rules that lower the divergence by known factors."""
    rng = np.random.default_rng(4)
    factors = {"none": 0.2, "base": 1.0, "attention": 3.0, "random": 1.1, "low_attention": 0.98}
    points = []
    for row in range(6):
        for edit in ("refresh", "flip"):
            kl = 0.003 * rng.lognormal(0, 0.5)
            for rule, factor in factors.items():
                for draw in range(2 if rule == "random" else 1):
                    points.append(
                        {
                            "context": f"{edit}-{row}",
                            "row": f"row-{row}",
                            "edit": edit,
                            "rule": rule,
                            "draw": draw,
                            "tokens": 1500,
                            "budget": 2,
                            "blocks": 2,
                            "rows": 64,
                            "repair_ratio": 0.02 if rule == "none" else 0.1,
                            "kl": float(kl / factor * rng.lognormal(0, 0.1)),
                            "first_kl": float(kl),
                            "exact_continuation": bool(row % 3 or rule == "attention"),
                        }
                    )
    return points


def sensitivity_points() -> list[dict[str, Any]]:
    """Points of `patchkv bench sensitivity`: the last of 20 blocks has most of the divergence."""
    rng = np.random.default_rng(5)
    points: list[dict[str, Any]] = []
    for context in range(3):
        kl = [1e-3 if block == 19 else 1e-5 * rng.random() for block in range(20)]
        shares = {"top_kl": 0.85, "top_risk": 0.4, "top_attention": 0.35, "top_error": 0.1}
        ranks = {"rank_risk": 0.5, "rank_attention": 0.45, "rank_error": None}
        sums = {"total_kl": sum(kl), "joint_kl": 2e-3, "answer_tokens": 16, **shares, **ranks}
        about = {"context": f"row-{context}", "tokens": 641}
        points.append({"kind": "context", **about, "blocks": 20, **sums})
        for block in range(20):
            figures = {name: float(rng.random()) for name in ("risk", "attention", "error")}
            place = {"place": (block + 0.5) / 20, "kl": kl[block], "first_kl": kl[block]}
            points.append(
                {"kind": "block", **about, "tokens": 32, "scored": block < 19, **place, **figures}
            )
    return points


def other_benches(folder: Path) -> None:
    """All benchmarks but `resume`."""
    rng = np.random.default_rng(3)
    ratios = {"native": 2.0, "f16": 1.0, "k8v8": 0.516, "k8v4": 0.391, "k4v4": 0.266, "mixed": 0.42}
    costs = {"native": 14, "f16": 8, "k8v8": 11, "k8v4": 12, "k4v4": 13, "mixed": 11.5}
    restore = [
        {
            "format": name,
            "tokens": tokens,
            "payload_bytes": int(23_040 * tokens * ratio),
            "payload_ratio": ratio,
            **timing("restore", costs[name] * tokens / 1000, rng),
            "payload_gb_per_s": 2.9 * ratio,
            "rows_gb_per_s": 5.2,
            "relative": costs[name] / costs["f16"],
        }
        for tokens in (2000, 4000, 8000)
        for name, ratio in ratios.items()
    ]
    write_bench(folder, "restore", restore)
    mixes = {
        "all f16": (1.0, 5e-7),
        "all k8v8": (0.516, 1.7e-4),
        "all k8v4": (0.391, 4.2e-3),
        "all k4v4": (0.266, 4.2e-2),
        "default": (0.417, 4.1e-4),
    }
    formats: list[dict[str, Any]] = []
    for name, (ratio, kl) in mixes.items():
        own = [float(kl * each) for each in rng.lognormal(0, 0.8, 12)]
        formats.append(
            {
                "kind": "mix",
                "name": name,
                "payload_ratio": ratio,
                "shares": {"f16": 0.02, "k8v8": 0.1, "k8v4": 0.88} if name == "default" else {},
                "kl": own,
                "kl_median": float(np.median(own)),
                "kl_mean": float(np.mean(own)),
                "contexts": 12,
            }
        )
    formats.append(
        {
            "kind": "candidate",
            "of": "keys",
            "name": "8 bits, a scale per block and channel",
            "bits": 8.5,
            "error": 0.0049,
            "kl": [1e-4],
            "kl_median": 1e-4,
        }
    )
    write_bench(folder, "formats", formats)
    write_bench(folder, "drift", drift_points())
    settings = {"model": "smollm2", "window": 32, "tail": 64, "budget": 0.05}
    write_bench(folder, "selection", selection_points(), config=settings)
    settings = {"model": "smollm2", "format": "k8v4"}
    write_bench(folder, "sensitivity", sensitivity_points(), config=settings)
    packing = [
        {
            "rows": rows,
            **timing("in_turn", ms * gain, rng),
            **timing("packed", ms, rng),
            "gain": gain,
        }
        for rows, ms, gain in ((1, 25.0, 2.1), (64, 210.0, 1.2), (500, 1500.0, 0.99))
    ]
    write_bench(folder, "packing", packing, config={"model": "smollm2", "threads": 4})
    lengths = (1000, 2000, 4000, 8000, 16000)
    steps = {
        "aggregation": 0.4,
        "align": 0.9,
        "repair_set": 0.3,
        "precision_planning": 6.0,
        "tagging": 0.2,
    }
    plan = []
    for tokens in lengths:
        timings = [timing(step, ms * tokens / 1000, rng) for step, ms in steps.items()]
        plan.append({"tokens": tokens} | {k: v for each in timings for k, v in each.items()})
    write_bench(folder, "plan", plan)
    align = [
        {
            "text": text,
            "tokens": tokens,
            "hunks": hunks,
            "hunks_found": hunks,
            **timing("align", (1 + 0.1 * hunks) * tokens / 1000, rng),
            **timing("plan", 0.5 + tokens / 8000, rng),
        }
        for text in ("zipf", "repeated")
        for hunks in (1, 8, 64)
        for tokens in lengths
    ]
    write_bench(folder, "align", align)
    attention = [
        {
            "tokens": tokens,
            **timing("prefill", tokens * 1.2, rng),
            **timing("captured", tokens * 1.22, rng),
            **timing("mapped", tokens * 1.25, rng),
            "overhead": float(rng.normal(0.018, 0.012)),
            "mapped_overhead": float(rng.normal(0.04, 0.012)),
            "observe_share": 0.011,
            "mapped_share": 0.036,
        }
        for tokens in lengths[:4]
    ]
    write_bench(folder, "attention", attention)
    store = [
        {
            "store": "folder",
            "mix": mix,
            "tokens": 4000,
            "payload_bytes": int(92_160_000 * ratios[mix]),
            **timing("save", 90, rng),
            **timing("first_layer", 4, rng),
            **timing("load", 50, rng),
            "save_gb_per_s": 1.0,
            "load_gb_per_s": 1.8,
        }
        for mix in ("native", "f16", "mixed")
    ]
    write_bench(folder, "store", store)


def write_everything(folder: Path) -> Path:
    """Three data sets with three edits, ablations, a second model, and every benchmark."""
    failures = [
        {"row": "hotpotqa-9", "edit": "flip", "method": None, "reason": "the answer is yes or no"},
        {"row": "hotpotqa-11", "edit": "flip", "method": None, "reason": "the answer is yes or no"},
        {
            "episode": "hotpotqa-12:refresh",
            "row": "hotpotqa-12",
            "edit": "refresh",
            "step": 0,
            "method": "cacheblend",
            "reason": "RuntimeError: out of memory",
        },
    ]
    for dataset in ("hotpotqa", "2wikimqa", "triviaqa"):
        own = failures if dataset == "hotpotqa" else []
        write_run(folder / "smollm2" / dataset, records(dataset), own, dataset=dataset)
    methods = (*MAIN[:2], "patchkv", *ABLATIONS)
    write_run(
        folder / "smollm2" / "ablations",
        records(methods=methods, edits=("refresh",), rows=6, seed=5),
        methods=list(methods),
        edits=["refresh"],
    )
    other = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "fingerprint": "c4b5a6"}
    lines = records(rows=4, seed=7, slower=3.2)
    write_run(folder / "qwen" / "hotpotqa", lines, **other)
    for sweep in ("length", "position", "edit_size", "attention", "block", "precision"):
        fits = [
            {"method": "prefix_cache", "exponent": 1.55, "ms_at_1000": 800, "residual": 0.04},
            {"method": "patchkv", "exponent": 0.81, "ms_at_1000": 260, "residual": 0.06},
        ]
        extra = {"fits": fits} if sweep == "length" else {}
        write_bench(folder / "bench", "resume", resume_points(sweep), variant=sweep, **extra)
    other_benches(folder / "bench")
    return folder
