"""`patchkv log`: the versions of a thread, and the edits that made them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from patchkv_agents.cli.options import AsJson
from patchkv_agents.cli.threads import NamespaceOption, open_store, open_thread
from patchkv_agents.console import new_console, plural


def log(
    database: Annotated[Path, typer.Argument(metavar="DB", help="The history file (SQLite).")],
    thread: Annotated[
        str | None, typer.Argument(help="The thread's name. Without it, threads are listed.")
    ] = None,
    namespace: NamespaceOption = "",
    branch: Annotated[
        str | None, typer.Option(help="Only what led to this branch's newest version.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the versions of a thread, newest first, with the edits that made each of them.

    Without a thread, list the threads of the file.
    """
    if thread is None:
        _list_threads(database, as_json)
        return
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


def _list_threads(database: Path, as_json: bool) -> None:
    with open_store(database) as store:
        threads = [(key, len(store.version_ids(key))) for key in store.threads()]
    if as_json:
        listed = [
            {"thread": key.thread, "namespace": key.namespace, "versions": count}
            for key, count in threads
        ]
        typer.echo(json.dumps({"threads": listed}))
        return
    console = new_console()
    console.print(f"{plural(len(threads), 'thread')} in {database}")
    for key, count in threads:
        namespace = f" --namespace {shlex.quote(key.namespace)}" if key.namespace else ""
        console.print(f"  {shlex.quote(key.thread)}{namespace}: {plural(count, 'version')}")
