"""Terminal output of `patchkv demo`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from patchkv_agents.alignment import Alignment
from patchkv_agents.console import plural, print_table
from patchkv_agents.context import ContextVersion, Conversation, Edit
from patchkv_agents.context.excerpts import one_line
from patchkv_agents.profiling.comparison import Comparison
from patchkv_agents.recovery import RecoveryPlan, RowLabel

_STRIP_CELLS = 72
_STORED = -1  # not a label of the plan: restored, but in front of the edit
# Label, how a cell looks, what the legend says. Where a cell covers several, the later one shows.
_STRIP = (
    (RowLabel.RESTORED, "░", "cyan", "restored: behind the edit, from the checkpoint, approximate"),
    (_STORED, "█", "bright_green", "restored: before the edit, right but for the bits of storage"),
    (RowLabel.PREFIX, "█", "green", "exact: before the edit, untouched"),
    (RowLabel.WINDOW, "▓", "yellow", "recomputed: right behind an edit"),
    (RowLabel.TAIL, "▚", "bright_magenta", "recomputed: last prompt tokens"),
    (RowLabel.ATTENTION, "▒", "bright_red", "recomputed: received much attention"),
    (RowLabel.DEVIATION, "▒", "red", "recomputed: differed most from the stored state"),
    (RowLabel.NEW, "+", "bright_blue", "new: had no state"),
)
_EXCERPT = 150
_LONGEST_ANSWER = 1_000


@dataclass(frozen=True, slots=True)
class Task:
    """The two contexts, with the question and the answers of the built-in episode."""

    old: Conversation
    new: Conversation
    question: str | None = None
    answer_old: str | None = None
    answer_new: str | None = None


def speedup(comparison: Comparison) -> float:
    """Resume TTFT of prefix cache divided by PatchKV's."""
    methods = comparison.methods
    baseline = methods["prefix_cache"].reply.report.resume_ttft_ms
    return baseline / methods["patchkv"].reply.report.resume_ttft_ms


def show(
    console: Console, model: str, task: Task, alignment: Alignment, comparison: Comparison
) -> None:
    """Print the versions, the edit, the plan as a strip, the methods side by side, the answers."""
    say = console.print
    patchkv = comparison.methods["patchkv"].reply
    say(
        f"Model {model}; {alignment.tokens_old:,} tokens before the edit, "
        f"{alignment.tokens_new:,} after it."
    )
    if task.question:
        say(f"The agent is asked: {task.question}")
    say("\nVersions")
    for version in comparison.versions:
        say(f"  {_describe_version(version)}")
        for edit in version.edits:
            say(f"    {_describe_edit(edit, task)}")
    if not alignment.hunks:
        say("  The two contexts are the same: all rows are there, one token is computed.")
    say("\nWhat PatchKV does with each token of the new version")
    labels = _shown_labels(patchkv.plan)
    console.print(_strip(labels))
    for label, cell, style, meaning in _STRIP:
        tokens = int(np.count_nonzero(labels == label))
        if tokens:
            console.print(Text.assemble("  ", (cell, style), f" {tokens:>6,} {meaning}"))
    if patchkv.report.fallback_reason:
        say(f"  Exact prefill instead: {patchkv.report.fallback_reason}")
    say()
    _print_methods(console, comparison)
    say(
        "TTFT: milliseconds from the start of recovery to the first output token; restoring and\n"
        "computing rows are its parts. KL, top-1 and the next 16 greedy tokens are compared with\n"
        f"the full prefill; KL is in nats. Planning took {patchkv.report.planning_ms:.1f} ms "
        f"before that, rendering {patchkv.report.render_ms:.0f} ms."
    )
    _show_answers(say, task, comparison)
    say()
    if patchkv.report.fallback_reason:
        return
    if patchkv.report.is_exact:
        say("Nothing had to be approximated: PatchKV's result is exact.")
        return
    say(
        f"PatchKV resumed {speedup(comparison):.1f} times faster than prefix cache, computing "
        f"{patchkv.report.recompute_ratio:.1%} of the rows\nfrom the edit on. Its result is "
        "an approximation and says so; RecoveryPolicy.exact()\nalways gives the full prefill's."
    )


def _show_answers(say: Callable[[str], None], task: Task, comparison: Comparison) -> None:
    say("\nAnswers")
    rows = [("before the edit", comparison.old_reply.text)]
    rows += [
        (name.replace("_", " "), result.reply.text) for name, result in comparison.methods.items()
    ]
    for name, text in rows:
        say(f"  {name:<16} {one_line(text, _LONGEST_ANSWER)}")
    if task.answer_old and task.answer_new:
        say(f"  The stale page says {task.answer_old}, the right one {task.answer_new}.")


def _describe_version(version: ContextVersion) -> str:
    parent = f", after {version.parents[0]}" if version.parents else ""
    return f"{version.id}: {plural(len(version.messages), 'message')}{parent}"


def _describe_edit(edit: Edit, task: Task) -> str:
    old, new = edit.old_index, edit.new_index
    if edit.scope != "messages":
        return f"{edit.kind.value}: {edit.scope.replace('_', ' ')}"
    lines = [f"{edit.kind.value}: message {old if new is None else new}"]
    for sign, context, index in (("-", task.old, old), ("+", task.new, new)):
        if index is not None:
            lines.append(f"      {sign} {one_line(context.messages[index].text, _EXCERPT)}")
    return "\n".join(lines)


def _shown_labels(plan: RecoveryPlan) -> npt.NDArray[np.int8]:
    labels = plan.labels.copy()
    before = labels[: plan.prefix]
    before[before == RowLabel.RESTORED] = _STORED
    return labels


def _strip(labels: npt.NDArray[np.int8]) -> Text:
    """The new version from left to right, a fixed number of cells wide."""
    tokens = len(labels)
    borders = np.linspace(0, tokens, min(_STRIP_CELLS, tokens) + 1).astype(int)
    strip = Text("  ")
    for start, stop in zip(borders[:-1], borders[1:], strict=True):
        present = set(labels[start:stop].tolist())
        shown = [entry for entry in _STRIP if entry[0] in present][-1]
        strip.append(shown[1], style=shown[2])
    return strip


def _scientific(value: float) -> str:
    """One digit and an exponent; rounding errors of float32 count as 0."""
    return f"{value:.0e}" if value > 1e-9 else "0"


def _print_methods(console: Console, comparison: Comparison) -> None:
    headers = ("method", "TTFT", "restore", "compute", "rows run", "KL", "top-1", "next 16")
    rows = []
    for name, result in comparison.methods.items():
        report = result.reply.report
        rows.append(
            (
                name.replace("_", " "),
                f"{report.resume_ttft_ms:,.0f}",
                f"{report.restore_ms:,.0f}",
                f"{report.recompute_ms:,.0f}",
                f"{report.recompute_ratio:.1%}",
                _scientific(result.first_token_kl),
                "same" if result.top1_agree else "other",
                "same" if result.exact_continuation else "other",
            )
        )
    print_table(console, headers, rows)
