"""`patchkv log`: the versions of a thread, and the edits that made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from patchkv_agents.cli.options import AsJson
from patchkv_agents.cli.threads import NamespaceOption, open_thread
from patchkv_agents.console import new_console, plural


def log(
    database: Annotated[Path, typer.Argument(metavar="DB", help="The history file (SQLite).")],
    thread: Annotated[str, typer.Argument(help="The thread's name.")],
    namespace: NamespaceOption = "",
    branch: Annotated[
        str | None, typer.Option(help="Only what led to this branch's newest version.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the versions of a thread, newest first, with the edits that made each of them."""
    from patchkv_agents.cli.version_view import print_version, version_document

    with open_thread(database, thread, namespace) as reader:
        versions = reader.all() if branch is None else reader.ancestors(reader.newest(branch))
        if as_json:
            document = {
                "thread": reader.key.thread,
                "namespace": reader.key.namespace,
                "branches": reader.branches,
                "versions": [version_document(reader, version) for version in versions],
            }
            typer.echo(json.dumps(document))
            return
        console = new_console()
        console.print(f"{plural(len(reader.ids), 'version')} of thread {reader.name}")
        for version in versions:
            console.print()
            print_version(console, reader, version)
