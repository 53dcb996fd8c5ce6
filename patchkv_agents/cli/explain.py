"""`patchkv explain`: why the exact prefix of a version ends where it does."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchkv_agents.cli.options import AsJson
from patchkv_agents.cli.threads import NamespaceOption, open_thread
from patchkv_agents.cli.tokens import ModelOption, load_tokens
from patchkv_agents.console import naming, new_console
from patchkv_agents.errors import InputError

if TYPE_CHECKING:
    from patchkv_agents.context import ContextVersion, Edit, RenderedContext


def explain(
    database: Annotated[
        Path | None, typer.Argument(metavar="[DB]", help="The history file (SQLite).")
    ] = None,
    thread: Annotated[
        str | None, typer.Argument(metavar="[THREAD]", help="The thread's name.")
    ] = None,
    namespace: NamespaceOption = "",
    version: Annotated[
        str | None,
        typer.Option(help="The version in question: an id or a branch; the newest if left out."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="The version whose state was there; the one before if left out."),
    ] = None,
    old: Annotated[
        Path | None, typer.Option(help="Instead of DB and THREAD: the conversation before (JSON).")
    ] = None,
    new: Annotated[Path | None, typer.Option(help="The conversation after it (JSON).")] = None,
    model: ModelOption = "smollm2",
    as_json: AsJson = False,
) -> None:
    """Explain why a version cannot use the whole of the KV cache of the one before.

    Names the first differing token, its message and edit, the cause (a clock in the system prompt,
    reordered tools, re-serialised arguments, cleared results and so on), and a remedy.
    Versions come from a history file (DB THREAD) or from two conversation files (--old and --new).
    """
    from patchkv_agents.alignment import align
    from patchkv_agents.cli.explain_view import document, show
    from patchkv_agents.context.explaining.explain import explain as explained

    if old is not None or new is not None:
        if database is not None or version is not None or against is not None:
            raise InputError("give either DB and THREAD, or --old and --new")
        before, after, edits = _from_files(old, new)
    elif database is not None and thread is not None:
        before, after, edits = _from_history(database, thread, namespace, version, against)
    else:
        raise InputError(
            "say what to explain: a history file and a thread (`patchkv explain DB THREAD`), or "
            "two conversations (`patchkv explain --old OLD --new NEW`)"
        )
    tokens = load_tokens(model)

    @cache
    def render(version: ContextVersion) -> RenderedContext:
        with naming(version.id):
            return tokens.render(version)

    explanation = explained(before, after, render, edits=edits)
    alignment = align(render(before).token_ids, render(after).token_ids)
    if as_json:
        typer.echo(json.dumps(document(explanation, alignment, before, after, tokens)))
        return
    show(new_console(), explanation, alignment, before, after, tokens)


Pair = tuple["ContextVersion", "ContextVersion", "tuple[Edit, ...] | None"]
"""Two versions, and the edits between them if they are known."""


def _from_files(old: Path | None, new: Path | None) -> Pair:
    from patchkv_agents.context import ContextVersion, load_conversation

    if old is None or new is None:
        raise InputError("--old and --new belong together: give both files")
    before, after = load_conversation(old), load_conversation(new)
    return (
        ContextVersion(str(old), before.messages, before.tools),
        ContextVersion(str(new), after.messages, after.tools),
        None,
    )


def _from_history(
    database: Path, thread: str, namespace: str, version: str | None, against: str | None
) -> Pair:
    with open_thread(database, thread, namespace) as reader:
        after = reader.newest(None) if version is None else reader.version(version)
        if against is not None:
            before = reader.version(against)
        elif after.parents:
            before = reader.version(after.parents[0])
        else:
            raise InputError(
                f"version {after.id} is the first one: nothing was there before it. Name another "
                "with --version, or what to compare it with by --against"
            )
    return before, after, after.edits if before.id in after.parents[:1] else None
