"""Tables of evaluation runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from patchkv_evals.report import numbers
from patchkv_evals.report.blocks import Block, Rows, Table, Text, few, table
from patchkv_evals.report.methods import PATCHKV, PREFIX_CACHE, REFERENCE, in_order, style_of
from patchkv_evals.report.sources import Evaluated

SHOWN_DIFFERENCES = 20

_HEADERS = (
    "method",
    "n",
    "F1 [95 %]",
    "EM [95 %]",
    "KL median (mean)",
    "same answer",
    "stale answers",
    "TTFT median",
    "speed-up",
    "rows computed",
    "payload",
    "of 16 bits",
)
METRICS_NOTE = (
    "F1 and EM in points of 100, mean and its 95 % bootstrap interval (rows drawn together). KL of "
    "the first token from a full prefill's, in nats. Same answer: share of answers equal to a full "
    "prefill's. Stale answers: how many give the answer from before the edit, where the "
    "edit changes it. TTFT: time to first token. Speed-up: prefix_cache's median TTFT over it. "
    "Rows computed: share of those after the first change. Payload: bytes read from the "
    "checkpoint, median, and to those of the same rows in 16 bits."
)


def run_table(evaluated: Evaluated, methods: Sequence[str]) -> Table:
    """Some methods of one run: over all edits, then for each edit."""
    summary = evaluated.summary
    groups = [_rows("all edits", summary["methods"], methods)] if len(summary["edits"]) > 1 else []
    groups += [_rows(edit, summary["edits"][edit], methods) for edit in summary["edits"]]
    return Table(_HEADERS, tuple(groups), evaluated.title, strong=frozenset((PATCHKV,)))


def _rows(title: str, entries: Mapping[str, Any], methods: Sequence[str]) -> Rows:
    base = _median(entries.get(PREFIX_CACHE, {}), "resume_ttft_ms")
    rows = [
        _cells(method, entries[method], base) for method in in_order(methods) if method in entries
    ]
    return Rows(tuple(rows), title)


def _cells(method: str, metrics: Mapping[str, Any], base: float | None) -> tuple[str, ...]:
    ttft = _median(metrics, "resume_ttft_ms")
    divergence = metrics.get("first_token_kl")
    return (
        method,
        str(max((entry["n"] for entry in metrics.values()), default=0)),
        numbers.points_interval(metrics.get("f1")),
        numbers.points_interval(metrics.get("em")),
        numbers.NONE
        if divergence is None
        else f"{numbers.kl(divergence['median'])} ({numbers.kl(divergence['mean'])})",
        numbers.percent(_mean(metrics, "same_answer")),
        _stale(metrics.get("stale_answer")),
        numbers.duration(ttft),
        numbers.times(base / ttft if base and ttft else None),
        numbers.percent(_median(metrics, "recompute_ratio")),
        numbers.megabytes(_median(metrics, "payload_bytes")),
        numbers.percent(_median(metrics, "payload_ratio")),
    )


def _median(metrics: Mapping[str, Any], name: str) -> float | None:
    entry = metrics.get(name)
    return None if entry is None else entry["median"]


def _mean(metrics: Mapping[str, Any], name: str) -> float | None:
    entry = metrics.get(name)
    return None if entry is None else entry["mean"]


def _stale(entry: Mapping[str, Any] | None) -> str:
    return numbers.NONE if entry is None else f"{entry['mean'] * entry['n']:.0f} of {entry['n']}"


def methods_table(names: Iterable[str]) -> Table:
    """What each method is, in one line."""
    rows = [(name, style_of(name).explanation or numbers.NONE) for name in in_order(names)]
    return table(("method", "what it does"), rows, text_columns=2)


def differences(runs: Sequence[Evaluated]) -> list[Block]:
    """Where PatchKV's answer is not the full prefill's, or is stale: the first few in full."""
    rows, compared = [], 0
    for evaluated in runs:
        references = {
            (record["episode"], record["step"]): record["prediction"]
            for record in evaluated.run.records
            if record["method"] == REFERENCE
        }
        for record in evaluated.run.records:
            if record["method"] != PATCHKV:
                continue
            compared += 1
            stale = record["metrics"].get("stale_answer")
            same = record["metrics"].get("same_answer")
            if stale or (same is not None and not same):
                reference = references.get((record["episode"], record["step"]), "")
                rows.append(
                    (
                        f"{evaluated.title}, {record['edit']}",
                        numbers.short(str(record["row"]), 40),
                        numbers.short(reference),
                        numbers.short(record["prediction"]),
                        numbers.short(" | ".join(record["answers"]), 80),
                        "yes" if stale else "",
                    )
                )
    if not compared:
        return []
    head = Text(
        f"{PATCHKV} gave another answer than a full prefill, or a stale one, in {len(rows)} of "
        f"{compared} episodes"
        + (f"; the first {SHOWN_DIFFERENCES}:" if len(rows) > SHOWN_DIFFERENCES else ".")
    )
    headers = ("data and edit", "row", REFERENCE, PATCHKV, "accepted", "stale")
    found = table(headers, rows[:SHOWN_DIFFERENCES], text_columns=len(headers))
    return [head, found] if rows else [head]


def failures(runs: Sequence[Evaluated]) -> list[Block]:
    """Failures and rows that gave no episode, counted by reason."""
    counts = Counter(
        (
            evaluated.title,
            failure.get("edit") or numbers.NONE,
            failure.get("method") or "all",
            numbers.short(str(failure["reason"]), 240),
        )
        for evaluated in runs
        for failure in evaluated.run.failures
    )
    if not counts:
        return [Text("None: every row gave its episodes, and every method its results.")]
    rows = [(*key[:3], str(count), key[3]) for key, count in counts.most_common()]
    total = sum(counts.values())
    return [
        Text(f"{total} in all. They are in no other figure of this page."),
        table(("data", "edit", "method", "count", "reason"), rows, text_columns=5),
    ]


def few_rows(evaluated: Evaluated) -> Block | None:
    """A note where the run has few rows."""
    rows = {record["row"] for record in evaluated.run.records}
    return few(len(rows), f"rows in {evaluated.title}")
