"""`patchkv demo`: an agent's context is edited in its middle, and its KV cache recovered."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from .episode import DEFAULT_TOKENS, build_episode

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..alignment import Alignment
    from ..baselines import Comparison
    from ..context import ContextVersion, Conversation, Edit
    from ..engine import Engine
    from ..recovery import RecoveryPlan, RecoveryReport

_PLAN_FIELDS = ("prefix", "new", "window", "attention", "tail", "restored")
_REPORT_FIELDS = (
    "resume_ttft_ms",
    "planning_ms",
    "restore_ms",
    "recompute_ratio",
    "repair_ratio",
)
_STRIP_CELLS = 72
# Label, how a cell looks, what the legend says. Where a cell covers several, the later one shows.
_STRIP = (
    ("RESTORED", "░", "cyan", "restored: moved from the checkpoint, approximate"),
    ("PREFIX", "█", "green", "exact: before the edit, untouched"),
    ("WINDOW", "▓", "yellow", "recomputed: right behind an edit"),
    ("TAIL", "▓", "bright_magenta", "recomputed: last prompt tokens"),
    ("ATTENTION", "▓", "bright_red", "recomputed: received much attention"),
    ("NEW", "█", "bright_blue", "new: had no state"),
)


@dataclass(frozen=True, slots=True)
class _Task:
    """The two contexts, and what the built-in episode knows of the answers."""

    old: Conversation
    new: Conversation
    question: str | None = None
    answer_old: str | None = None
    answer_new: str | None = None


def demo(
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="smollm2 (embedded), a folder, or a Transformers model id."
        ),
    ] = "smollm2",
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Length of the built-in episode.  [default: {DEFAULT_TOKENS}]"),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Repeat the methods, interleaved; times are medians.")
    ] = 1,
    old: Annotated[
        Path | None, typer.Option(help="Your own conversation before the edit (JSON).")
    ] = None,
    new: Annotated[
        Path | None, typer.Option(help="Your own conversation after the edit (JSON).")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    """Edit an agent's context in its middle and compare ways to bring its KV cache back.

    The built-in episode is an agent that answers a question over retrieved pages, one of which
    was stale and is replaced. With --old and --new it runs on your own two conversations,
    {"messages": [...], "tools": [...]} in OpenAI form.
    """
    from rich.console import Console

    from ..context import load_conversation

    if (old is None) != (new is None):
        raise InputError("--old and --new belong together: give both files, or neither")
    if old is not None and tokens is not None:
        raise InputError("--tokens sizes the built-in episode: leave it out with --old and --new")
    own = None
    if old is not None and new is not None:
        own = _Task(load_conversation(old), load_conversation(new))
    errors = Console(stderr=True)
    with errors.status(f"Loading {model}") as status:
        from ..alignment import align
        from ..baselines import DIRECT_REUSE, PREFIX_CACHE, compare_methods
        from ..context import render
        from ..engine import Engine
        from ..recovery import RecoveryPolicy

        # The policy is named here: without a validated profile an engine recovers exactly.
        policy = RecoveryPolicy.default()
        engine = Engine.from_pretrained(model)
        task = own or _built_in(engine, DEFAULT_TOKENS if tokens is None else tokens)
        rendered = [render(context, engine.tokenizer) for context in (task.old, task.new)]
        alignment = align(rendered[0].token_ids, rendered[1].token_ids)
        comparison = compare_methods(
            engine,
            task.old,
            task.new,
            (PREFIX_CACHE, DIRECT_REUSE, policy),
            rounds=rounds,
            progress=lambda step: status.update(f"{model}: {step}"),
        )
    if as_json:
        typer.echo(json.dumps(_document(model, alignment, comparison)))
        return
    _show(Console(highlight=False), task, alignment, comparison, model=model)


def _built_in(engine: Engine, tokens: int) -> _Task:
    from ..context import Conversation, parse_messages, parse_tools, render

    def count(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int:
        return len(render(messages, engine.tokenizer, tools=tools))

    episode = build_episode(tokens, count)
    tools = parse_tools(episode.tools)
    return _Task(
        Conversation(parse_messages(episode.old), tools),
        Conversation(parse_messages(episode.new), tools),
        episode.question,
        episode.answer_old,
        episode.answer_new,
    )


def _speedup(comparison: Comparison) -> float:
    methods = comparison.methods
    baseline = methods["prefix_cache"].reply.report.resume_ttft_ms
    return baseline / methods["patchkv"].reply.report.resume_ttft_ms


def _document(model: str, alignment: Alignment, comparison: Comparison) -> dict[str, Any]:
    """The JSON document. `edit` names the first edit; ranges are half-open, in tokens."""
    report = comparison.methods["patchkv"].reply.report
    edits = comparison.new_version.edits
    return {
        "model": model,
        "tokens_old": alignment.tokens_old,
        "tokens_new": alignment.tokens_new,
        "edit": {
            "kind": edits[0].kind.value if edits else None,
            "old_index": edits[0].old_index if edits else None,
            "new_index": edits[0].new_index if edits else None,
            "hunks": [
                {"old": [hunk.old_start, hunk.old_stop], "new": [hunk.new_start, hunk.new_stop]}
                for hunk in alignment.hunks
            ],
        },
        "plan": {name: getattr(report, name) for name in _PLAN_FIELDS},
        "methods": {
            name: {
                **{field: getattr(result.reply.report, field) for field in _REPORT_FIELDS},
                "first_token_kl": result.first_token_kl,
                "top1_agree": result.top1_agree,
                "exact_continuation": result.exact_continuation,
                "answer": result.reply.text,
            }
            for name, result in comparison.methods.items()
        },
        "speedup_vs_prefix_cache": _speedup(comparison),
    }


def _show(
    console: Console, task: _Task, alignment: Alignment, comparison: Comparison, *, model: str
) -> None:
    def say(text: str = "") -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(
        f"Model {model}; {alignment.tokens_old:,} tokens before the edit, "
        f"{alignment.tokens_new:,} after it."
    )
    if task.question:
        say(f"The agent is asked: {task.question}")
    say()
    say("Versions")
    for version in comparison.versions:
        say(f"  {_describe_version(version)}")
        for edit in version.edits:
            say(f"    {_describe_edit(edit, task)}")
    if not alignment.hunks:
        say("  The two contexts are the same: every row is an exact hit, one token is computed.")
    say()
    report = comparison.methods["patchkv"].reply.report
    say("What PatchKV does with each token of the new version")
    console.print(_strip(comparison.methods["patchkv"].reply.plan))
    for label, cell, style, meaning in _STRIP:
        tokens = getattr(report, label.lower())
        if tokens:
            console.print(f"  [{style}]{cell}[/] {tokens:>6,} {meaning}")
    if report.fallback_reason:
        say(f"  Exact prefill instead: {report.fallback_reason}")
    say()
    console.print(_table(comparison))
    say(
        "TTFT is from the start of recovery to the first output token; KL is of the first token, "
        "in nats, from a full prefill."
    )
    _show_answers(say, task, comparison)
    say()
    say(
        f"PatchKV resumed {_speedup(comparison):.1f} times faster than prefix cache, with "
        f"{report.recompute_ratio:.1%} of the rows behind the exact prefix computed."
    )
    if not report.is_exact:
        say(
            "Its result is an approximation and reports itself as one; "
            "RecoveryPolicy.exact() gives the full prefill's."
        )


def _show_answers(say: Any, task: _Task, comparison: Comparison) -> None:
    say()
    say("Answers")
    rows = [("before the edit", comparison.old_reply.text)]
    rows += [
        (name.replace("_", " "), result.reply.text) for name, result in comparison.methods.items()
    ]
    for name, text in rows:
        say(f"  {name:<16} {' '.join(text.split())}")
    if task.answer_old and task.answer_new:
        say(f"  The stale page says {task.answer_old}, the right one {task.answer_new}.")


def _describe_version(version: ContextVersion) -> str:
    parent = f", after {version.parents[0]}" if version.parents else ""
    return f"{version.id}: {len(version.messages)} messages{parent}"


def _describe_edit(edit: Edit, task: _Task) -> str:
    old, new = edit.old_index, edit.new_index
    if edit.scope != "messages":
        return f"{edit.kind.value}: {edit.scope.replace('_', ' ')}"
    lines = [f"{edit.kind.value}: message {old if new is None else new}"]
    for sign, context, index in (("-", task.old, old), ("+", task.new, new)):
        if index is not None:
            text = " ".join(context.messages[index].text.split())
            lines.append(f"      {sign} {text[:150]}{'...' if len(text) > 150 else ''}")
    return "\n".join(lines)


def _strip(plan: RecoveryPlan) -> Text:
    """The new version from left to right, a fixed number of cells wide."""
    import numpy as np
    from rich.text import Text

    from ..recovery import RowLabel

    tokens = len(plan.labels)
    cells = min(_STRIP_CELLS, tokens)
    borders = np.linspace(0, tokens, cells + 1).astype(int)
    strip = Text("  ")
    for start, stop in zip(borders[:-1], borders[1:], strict=True):
        present = set(plan.labels[start:stop].tolist())
        shown = [entry for entry in _STRIP if RowLabel[entry[0]] in present][-1]
        strip.append(shown[1], style=shown[2])
    return strip


def _table(comparison: Comparison) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method")
    headings = (
        "TTFT ms",
        "plan ms",
        "restore ms",
        "rows run",
        "repaired",
        "KL",
        "top-1",
        "16 tok.",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, result in comparison.methods.items():
        report: RecoveryReport = result.reply.report
        table.add_row(
            name.replace("_", " "),
            f"{report.resume_ttft_ms:,.0f}",
            f"{report.planning_ms:.1f}",
            f"{report.restore_ms:,.0f}",
            f"{report.recompute_ratio:.1%}",
            f"{report.repair_ratio:.1%}",
            f"{result.first_token_kl:.4f}",
            _yes(result.top1_agree),
            _yes(result.exact_continuation),
        )
    return table


def _yes(value: bool) -> str:
    return "same" if value else "differs"
