"""Targets of PatchKV, and all methods pooled over the runs of a model."""

from __future__ import annotations

from collections.abc import Sequence

from patchkv_agents.console import plural
from patchkv_evals.report import numbers
from patchkv_evals.report.blocks import Block, Table, few, table
from patchkv_evals.report.methods import CACHEBLEND, PATCHKV, PREFIX_CACHE, in_order
from patchkv_evals.report.sources import ModelRuns
from patchkv_evals.running.pooled import Pooled

_VERDICTS = {True: "✓ met", False: "✗ missed", None: "not measured"}


def headline(model: ModelRuns) -> str:
    """The comparison in a sentence."""
    figures = model.pooled.methods.get(PATCHKV)
    if figures is None:
        return f"{model.title}: no result of {PATCHKV}."
    parts = [
        f"{numbers.times_interval(figures.speedups[other])} as fast as {other}"
        for other in (PREFIX_CACHE, CACHEBLEND)
        if other in figures.speedups
    ]
    if figures.f1_difference is not None:
        parts.append(
            f"F1 {numbers.signed_interval(figures.f1_difference)} points from full prefill"
        )
    if figures.same_answer is not None:
        parts.append(f"same answer in {numbers.percent(figures.same_answer.estimate)}")
    episodes = plural(figures.n, "episode")
    rows = plural(model.pooled.rows, "row")
    return f"{model.title}: {PATCHKV} {', '.join(parts)} ({episodes} of {rows}; 95 % intervals)."


def headlines(models: Sequence[ModelRuns]) -> Table:
    """PatchKV on each model in a line."""
    rows = []
    for model in models:
        figures = model.pooled.methods.get(PATCHKV)
        if figures is None:
            rows.append((model.title, *(numbers.NONE,) * 6))
            continue
        verdicts = [target.met for target in model.pooled.targets(PATCHKV)]
        rows.append(
            (
                model.title,
                f"{figures.n} ({model.pooled.rows})",
                numbers.times_interval(figures.speedups.get(PREFIX_CACHE)),
                numbers.times_interval(figures.speedups.get(CACHEBLEND)),
                numbers.signed_interval(figures.f1_difference),
                numbers.percent_interval(figures.same_answer),
                f"{verdicts.count(True)} of {len(verdicts)}",
            )
        )
    headers = (
        "model",
        "episodes (rows)",
        "speed-up over prefix_cache",
        "speed-up over cacheblend",
        "F1 − full prefill's, points",
        "same answer",
        "targets met",
    )
    return table(headers, rows, caption=f"{PATCHKV}, pooled over data sets and edits [95 %]")


def targets_blocks(model: ModelRuns) -> list[Block]:
    """Targets and whether they are met, then all methods with their intervals."""
    pooled = model.pooled
    if not pooled.methods:
        return []
    blocks: list[Block] = []
    if PATCHKV in pooled.methods:
        rows = [(t.name, t.wanted, t.value, _VERDICTS[t.met]) for t in pooled.targets(PATCHKV)]
        headers = ("target", "wanted", f"{PATCHKV} [95 %]", "verdict")
        blocks.append(table(headers, rows, text_columns=4))
    note = few(pooled.rows, "rows in all")
    return [*blocks, *([note] if note else []), _methods(pooled)]


def _methods(pooled: Pooled) -> Table:
    rows = []
    for name in in_order(pooled.methods):
        figures = pooled.methods[name]
        stale = f"{figures.stale_answers} ({figures.stale_answers_full_prefill})"
        rows.append(
            (
                name,
                str(figures.n),
                numbers.times_interval(figures.speedups.get(PREFIX_CACHE)),
                numbers.times_interval(figures.speedups.get(CACHEBLEND)),
                numbers.signed_interval(figures.f1_difference),
                numbers.percent_interval(figures.same_answer),
                f"{stale} of {figures.stale_n}" if figures.stale_n else numbers.NONE,
                numbers.kl_interval(figures.first_token_kl),
            )
        )
    headers = (
        "method",
        "n",
        "speed-up over prefix_cache",
        "speed-up over cacheblend",
        "F1 − full prefill's",
        "same answer",
        "stale (full prefill's)",
        "KL mean",
    )
    caption = "All methods, pooled over data sets and edits, with 95 % intervals"
    return table(headers, rows, caption=caption, strong=(PATCHKV,))
