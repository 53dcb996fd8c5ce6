"""`patchkv models`: which models are supported, and to what extent."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchkv_agents.cli.options import AsJson
from patchkv_agents.console import new_console, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from patchkv_agents.backends.transformers.families import Family

OTHERS = """\
Others are probed when they are loaded: a few random tokens show whether rows can be recomputed one
run at a time and keys moved. What passes is recovered like the above; where only keys cannot be
moved (positions that are not rotary, frequencies that change with the length of the context), exact
prefix reuse works. Vision-language models are used for text alone."""


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A local folder, a Transformers model id, or 'smollm2'. Only its configuration "
            "is read. Without a name: the list of families."
        ),
    ] = None,
    as_json: AsJson = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The list as the table of docs/models.md.")
    ] = False,
) -> None:
    """Show which models are supported: recovered, reused exactly, or refused, and why."""
    from patchkv_agents.backends.transformers.families import FAMILIES, REFUSED_FAMILIES

    if name is not None:
        document = model_document(name)
        typer.echo(json.dumps(document)) if as_json else _print_model(new_console(), document)
    elif as_json:
        document = {
            "families": [family_document(family) for family in FAMILIES.values()],
            "refused": [asdict(family) for family in REFUSED_FAMILIES],
        }
        typer.echo(json.dumps(document))
    elif markdown:
        typer.echo(markdown_table())
    else:
        _print_families(new_console(), list(FAMILIES.values()))


def family_document(family: Family) -> dict[str, Any]:
    """A verified family, for JSON."""
    from patchkv_agents.backends.transformers.verdict import SupportLevel

    return {
        "model_type": family.model_type,
        "examples": family.examples,
        "level": SupportLevel.APPROXIMATE.value,
        "rope_layout": None if family.layout is None else family.layout.value,
        "notes": family.notes,
    }


def markdown_table() -> str:
    """The support of all families as a table in Markdown."""
    from patchkv_agents.backends.transformers.families import FAMILIES, REFUSED_FAMILIES

    rows = [
        ("models", "model type", "support", "notes"),
        ("---", "---", "---", "---"),
        *((f.examples, f"`{f.model_type}`", "approximate", f.notes) for f in FAMILIES.values()),
        *((f.examples, f"`{f.model_type}`", "refused", f.reason) for f in REFUSED_FAMILIES),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def model_document(name: str) -> dict[str, Any]:
    """The support of one model, judged by its configuration, for JSON.

    Raises:
        ModelNotFoundError: there is no such model, or it cannot be fetched.
        UnsupportedModelError: Transformers does not know the architecture.
    """
    from patchkv_agents.backends.transformers.loading import load_config
    from patchkv_agents.backends.transformers.verdict import judge_config

    config = load_config(name)
    verdict, family = judge_config(config)
    return {
        "name": name,
        "model_type": config.model_type,
        "family": None if family is None else family.examples,
        "level": verdict.level.value,
        "reason": verdict.reason or None,
        "remedy": verdict.remedy or None,
        "max_tokens": verdict.max_tokens,
    }


def _print_families(console: Console, families: list[Family]) -> None:
    from patchkv_agents.backends.transformers.families import REFUSED_FAMILIES

    console.print("Recovered after any edit, exactly or approximately (verified families):")
    headers = ("model type", "models", "what is special")
    rows = [(family.model_type, family.examples, family.notes) for family in families]
    print_table(console, headers, rows, justify="left")
    console.print("Refused before any weights are read:")
    rows = [(refused.model_type, refused.examples, refused.reason) for refused in REFUSED_FAMILIES]
    print_table(console, ("model type", "models", "reason"), rows, justify="left")
    console.print(" ".join(OTHERS.split()))


def _print_model(console: Console, document: dict[str, Any]) -> None:
    from patchkv_agents.context.excerpts import escaped

    meaning = {
        "approximate": "recovered after any edit, exactly or approximately",
        "exact": "exact prefix reuse only",
        "probed": "not known before it is loaded",
        "refused": "refused",
    }[document["level"]]
    family = f", {document['family']}" if document["family"] else ""
    console.print(escaped(f"{document['name']} ({document['model_type']}{family}): {meaning}"))
    for line in (document["reason"], document["remedy"]):
        if line:
            console.print(escaped(f"  {line[0].upper()}{line[1:]}."))
