"""Tables of evaluation runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from patchkv_evals.report import numbers
from patchkv_evals.report.blocks import Block, Rows, Table, Text, table
from patchkv_evals.report.methods import PATCHKV, PREFIX_CACHE, in_order, style_of
from patchkv_evals.report.sources import ModelRuns, SourceRun

_HEADERS = (
    "method",
    "n",
    "KL median",
    "KL mean [95 %]",
    "same answer",
    "stale answers",
    "F1 [95 %]",
    "TTFT median",
    "speed-up",
    "rows computed",
    "payload of 16 bits",
)
_METRICS_NOTE = (
    "KL of the first token from a full prefill's, in nats. Same answer: share of answers equal to "
    "a full prefill's. Stale answers: how many give the answer from before the edit, where the "
    "edit changes it. F1 in points of 100, mean and its 95 % bootstrap interval (rows drawn "
    "together). TTFT: time to first token. Speed-up: prefix_cache's median TTFT over it. Rows "
    "computed: share of those after the first change, median. Payload: bytes read from the "
    "checkpoint, to those of the same rows in 16 bits, median."
)


def edit_tables(model: ModelRuns) -> list[Block]:
    """All methods of a model: over all edits, then for each kind of edit."""
    summary = model.summary
    groups = [_rows("all edits", summary["methods"])] if len(summary["edits"]) > 1 else []
    groups += [_rows(edit, methods) for edit, methods in summary["edits"].items()]
    caption = "Methods by kind of edit, over all data sets"
    found = Table(_HEADERS, tuple(groups), caption, strong=frozenset((PATCHKV,)))
    return [Text(_METRICS_NOTE), found]


def _rows(title: str, entries: Mapping[str, Any]) -> Rows:
    base = _statistic(entries.get(PREFIX_CACHE, {}), "resume_ttft_ms", "median")
    return Rows(tuple(_cells(name, entries[name], base) for name in in_order(entries)), title)


def _cells(method: str, metrics: Mapping[str, Any], base: float | None) -> tuple[str, ...]:
    ttft = _statistic(metrics, "resume_ttft_ms", "median")
    kl, stale = metrics.get("first_token_kl"), metrics.get("stale_answer")
    mean = numbers.NONE
    if kl is not None:
        low, high = (numbers.kl(bound) for bound in kl["ci"])
        mean = f"{numbers.kl(kl['mean'])} [{low}, {high}]"
    return (
        method,
        str(max((entry["n"] for entry in metrics.values()), default=0)),
        numbers.kl(_statistic(metrics, "first_token_kl", "median")),
        mean,
        numbers.percent(_statistic(metrics, "same_answer", "mean")),
        numbers.NONE if stale is None else f"{stale['mean'] * stale['n']:.0f} of {stale['n']}",
        numbers.points_interval(metrics.get("f1")),
        numbers.duration(ttft),
        numbers.times(base / ttft if base and ttft else None),
        numbers.percent(_statistic(metrics, "recompute_ratio", "median")),
        numbers.percent(_statistic(metrics, "payload_ratio", "median")),
    )


def _statistic(metrics: Mapping[str, Any], name: str, statistic: str) -> float | None:
    entry = metrics.get(name)
    return None if entry is None else entry[statistic]


def methods_table(names: Iterable[str]) -> Table:
    """What each method is, in one line."""
    rows = [(name, style_of(name).explanation or numbers.NONE) for name in in_order(names)]
    return table(("method", "what it does"), rows, text_columns=2)


def failures(runs: Sequence[SourceRun]) -> list[Block]:
    """Failures and rows that gave no episode, counted by reason."""
    counts = Counter(
        (
            source.title,
            failure.get("edit") or numbers.NONE,
            failure.get("method") or "all",
            numbers.short(str(failure["reason"]), 240),
        )
        for source in runs
        for failure in source.run.failures
    )
    if not counts:
        return [Text("None: every row gave its episodes, and every method its results.")]
    rows = [(*key[:3], str(count), key[3]) for key, count in counts.most_common()]
    return [
        Text(f"{sum(counts.values())} in all. They are in no other figure of this page."),
        table(("data", "edit", "method", "count", "reason"), rows, text_columns=5),
    ]
