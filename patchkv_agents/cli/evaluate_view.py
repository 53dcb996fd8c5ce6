"""Terminal output of `patchkv eval`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from patchkv_agents.console import plural, print_table
from patchkv_agents.context.excerpts import escaped

if TYPE_CHECKING:
    from rich.console import Console

    from patchkv_evals.running import Pooled

_COLUMNS = (
    ("F1", "f1", "mean", "{:.3f}"),
    ("EM", "em", "mean", "{:.3f}"),
    ("same", "same_answer", "mean", "{:.2f}"),
    ("stale", "stale_answer", "mean", "{:.2f}"),
    ("KL", "first_token_kl", "median", "{:.4f}"),
    ("TTFT", "resume_ttft_ms", "median", "{:,.0f}"),
    ("rows", "recompute_ratio", "median", "{:.0%}"),
    ("bytes", "payload_ratio", "median", "{:.0%}"),
)
"""Header, metric, statistic, format."""

_NOTES = (
    "Means of F1, EM and the shares of answers equal to the full prefill's and of stale ones; "
    "medians of the rest. KL of the first token from the full prefill's, in nats; resume TTFT in "
    "milliseconds; rows computed, of those behind the exact prefix; bytes read, to 16 bits."
)


def show_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """The tables of one run: all edits together, then each, then what failed."""
    config = summary["config"]
    console.print(
        escaped(
            f"{config['dataset']}, {config['model']} ({config['dtype']}), {config['tokens']:,} "
            f"tokens, {plural(config['rounds'], 'round')}"
        )
    )
    edits = summary["edits"]
    if len(edits) > 1:
        _table(console, "all edits", summary["methods"])
    for edit, methods in edits.items():
        _table(console, edit, methods)
    if edits:
        console.print(_NOTES)
    _failures(console, summary["failures"])


def show_pooled(console: Console, pooled: Pooled) -> None:
    """Several runs of one model: every method against the full prefill, and the targets."""
    console.print(
        escaped(
            f"{pooled.model}: {plural(pooled.episodes, 'episode')} of {plural(pooled.rows, 'row')} "
            f"in {plural(len(pooled.runs), 'run')}"
        )
    )
    headers = ("", "n", "x prefix cache", "x cacheblend", "F1", "same", "stale")
    lines = []
    for name, figures in pooled.methods.items():
        speedups = (figures.speedups.get(other) for other in ("prefix_cache", "cacheblend"))
        intervals = (*speedups, figures.f1_difference, figures.same_answer)
        cells = ["" if found is None else f"{found.estimate:.2f}" for found in intervals]
        stale = f"{figures.stale_answers} / {figures.stale_answers_full_prefill}"
        lines.append((name, str(figures.n), *cells, stale if figures.stale_n else ""))
    print_table(console, headers, lines)
    console.print(
        "How many times faster (ratios of median resume TTFT); F1 minus the full prefill's, in "
        "points; answers equal to it; stale answers / those of the full prefill. Intervals (95 %, "
        "rows drawn together) are below and with --json."
    )
    if "patchkv" in pooled.methods:
        for target in pooled.targets():
            met = {True: "met", False: "MISSED", None: "open"}[target.met]
            console.print(f"{met:>6}  {target.name}, {target.wanted}: {target.value}")
    failures = sum(len(run.failures) for run in pooled.runs)
    if failures:
        console.print(f"{plural(failures, 'failure')}: see failures.jsonl in the folders.")


def _table(console: Console, title: str, methods: Mapping[str, Any]) -> None:
    lines = []
    for name, metrics in methods.items():
        cells = [
            form.format(metrics[metric][statistic]) if metric in metrics else ""
            for _, metric, statistic, form in _COLUMNS
        ]
        lines.append((name, str(metrics["f1"]["n"]), *cells))
    print_table(console, (title, "n", *(header for header, *_ in _COLUMNS)), lines)


def _failures(console: Console, failures: Sequence[Mapping[str, Any]]) -> None:
    """How many rows, episodes and methods failed, and why."""
    reasons = Counter(
        (
            failure["method"] or ("episode" if "episode" in failure else "row"),
            failure["edit"],
            failure["reason"],
        )
        for failure in failures
    )
    for (what, edit, reason), count in reasons.most_common():
        console.print(escaped(f"{count} without result ({what}, {edit}): {reason}"))
