"""`patchkv demo`: edits an agent's context in the middle and recovers its KV cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchkv_agents.cli.options import AsJson, ModelOption
from patchkv_agents.console import new_console
from patchkv_agents.errors import InputError
from patchkv_agents.profiling.episode import DEFAULT_TOKENS, build_episode
from patchkv_agents.progress import show_progress

if TYPE_CHECKING:
    from patchkv_agents.alignment import Alignment
    from patchkv_agents.cli.demo_view import Task
    from patchkv_agents.engine import Engine
    from patchkv_agents.profiling.comparison import Comparison

ANSWER_TOKENS = 24

_PLAN_FIELDS = ("prefix", "new", "window", "attention", "tail", "deviation", "restored")
_REPORT_FIELDS = (
    "resume_ttft_ms",
    "planning_ms",
    "restore_ms",
    "recompute_ratio",
    "repair_ratio",
)


def demo(
    model: ModelOption = "smollm2",
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Length of the built-in episode; {DEFAULT_TOKENS} if left out."),
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
    as_json: AsJson = False,
) -> None:
    """Edit an agent's context in the middle and compare ways to recover its KV cache.

    The built-in episode is an agent that answers a question over retrieved pages, one of which
    was stale and is replaced. With --old and --new it runs on your own two conversations,
    {"messages": [...], "tools": [...]} in OpenAI form.
    """
    from patchkv_agents.context import load_conversation

    if (old is None) != (new is None):
        raise InputError("--old and --new belong together: give both files, or neither")
    if old is not None and tokens is not None:
        raise InputError("--tokens sizes the built-in episode: leave it out with --old and --new")
    own = None
    if old is not None and new is not None:
        own = (load_conversation(old), load_conversation(new))
    with show_progress(f"loading {model}") as progress:
        from patchkv_agents.alignment import align
        from patchkv_agents.cli.demo_view import Task, show
        from patchkv_agents.context import render
        from patchkv_agents.engine import Engine
        from patchkv_agents.profiling.comparison import compare_methods
        from patchkv_agents.recovery.named import method

        engine = Engine.from_pretrained(model)
        task = Task(*own) if own else _built_in(engine, tokens or DEFAULT_TOKENS)
        rendered = [render(context, engine.tokenizer) for context in (task.old, task.new)]
        for context in rendered:
            engine.check_length(len(context))
        alignment = align(rendered[0].token_ids, rendered[1].token_ids)
        comparison = compare_methods(
            engine,
            task.old,
            task.new,
            # Named here: without a validated profile an engine recovers exactly.
            [method(name) for name in ("prefix_cache", "direct_reuse", "patchkv")],
            rounds=rounds,
            max_new_tokens=ANSWER_TOKENS,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(_document(model, alignment, comparison)))
        return
    console = new_console()
    console.width = max(console.width, 80)
    show(console, model, task, alignment, comparison)


def _built_in(engine: Engine, tokens: int) -> Task:
    from patchkv_agents.cli.demo_view import Task
    from patchkv_agents.context import Conversation, parse_messages, parse_tools, render

    largest = engine.max_tokens - ANSWER_TOKENS
    if tokens > largest:
        raise InputError(
            f"an episode of {tokens} tokens leaves no room for an answer within the model's limit: "
            f"ask for --tokens {largest} or fewer"
        )

    def count(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> int:
        return len(render(messages, engine.tokenizer, tools=tools))

    episode = build_episode(tokens, count)
    tools = parse_tools(episode.tools)
    return Task(
        Conversation(parse_messages(episode.old), tools),
        Conversation(parse_messages(episode.new), tools),
        episode.question,
        episode.answer_old,
        episode.answer_new,
    )


def _document(model: str, alignment: Alignment, comparison: Comparison) -> dict[str, Any]:
    """The JSON document. `edit` names the first edit; ranges are half-open, in tokens."""
    from patchkv_agents.cli.demo_view import speedup

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
            "hunks": [hunk.to_dict() for hunk in alignment.hunks],
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
        "speedup_vs_prefix_cache": speedup(comparison),
    }
