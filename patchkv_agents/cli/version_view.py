"""Output of versions: a few lines for people, one object for programs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Console
from rich.text import Text

from patchkv_agents.cli.edit_view import edit_document, edit_lines
from patchkv_agents.cli.threads import ThreadReader
from patchkv_agents.console import plural
from patchkv_agents.context import ContextVersion
from patchkv_agents.context.excerpts import one_line

_LONGEST_NAME = 80


def print_version(console: Console, reader: ThreadReader, version: ContextVersion) -> None:
    """Print id, time, branches, parents and edits of a version."""
    branches = reader.branches_at(version)
    head = Text(version.id, style="yellow")
    if branches:
        head.append(f"  ({one_line(', '.join(branches), _LONGEST_NAME)})", style="green")
    console.print(head)
    console.print(f"  {_facts(version)}")
    for line in edit_lines(version.edits):
        console.print(f"  {line}")
    if version.forgotten is not None:
        forgotten = version.forgotten
        console.print(
            f"  forgotten: {plural(forgotten.messages, 'message')} in "
            f"{plural(len(forgotten.versions), 'version')}, {forgotten.status}"
        )


def _facts(version: ContextVersion) -> str:
    facts = []
    if version.time_s:
        facts.append(f"{datetime.fromtimestamp(version.time_s):%Y-%m-%d %H:%M:%S}")
    facts.append(plural(len(version.messages), "message"))
    if version.tools:
        facts.append(plural(len(version.tools), "tool"))
    if version.author is not None:
        facts.append(f"by {one_line(version.author, _LONGEST_NAME)}")
    if version.checkpoint_id is not None:
        facts.append(f"checkpoint {one_line(version.checkpoint_id, _LONGEST_NAME)}")
    if version.parents:
        facts.append(f"after {', '.join(version.parents)}")
    return ", ".join(facts)


def version_document(
    reader: ThreadReader, version: ContextVersion, *, contents: bool = False
) -> dict[str, Any]:
    """A version as JSON values: `messages` is their number, or with `contents` the messages."""
    document: dict[str, Any] = {
        "id": version.id,
        "parents": list(version.parents),
        "branches": reader.branches_at(version),
        "author": version.author,
        "checkpoint_id": version.checkpoint_id,
        "time_s": version.time_s,
        "edits": [edit_document(edit) for edit in version.edits],
        "forgotten": None,
        "messages": len(version.messages),
        "tools": len(version.tools),
    }
    if version.forgotten is not None:
        document["forgotten"] = {
            "messages": version.forgotten.messages,
            "versions": list(version.forgotten.versions),
            "hashes": version.forgotten.hashes,
            "status": version.forgotten.status,
        }
    if contents:
        document["messages"] = [message.to_openai() for message in version.messages]
        document["tools"] = [tool.load() for tool in version.tools]
        document["template_args"] = version.template_args.load()
    return document
