"""`patchkv show`: one version of a thread, with its messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchkv_agents.cli.options import AsJson
from patchkv_agents.cli.threads import NamespaceOption, open_thread
from patchkv_agents.console import new_console

if TYPE_CHECKING:
    from rich.console import Console

    from patchkv_agents.context import ContextVersion, Message

_EXCERPT = 400  # characters of each text


def show(
    database: Annotated[Path, typer.Argument(metavar="DB", help="The history file (SQLite).")],
    thread: Annotated[str, typer.Argument(help="The thread's name.")],
    version: Annotated[
        str, typer.Argument(help="A version's id, a unique beginning or end of it, or a branch.")
    ],
    namespace: NamespaceOption = "",
    full: Annotated[bool, typer.Option("--full", help="Print long texts to their end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one version of a thread: the edits that made it, its tools and its messages.

    With --json, "messages" and "tools" have OpenAI's form: the document is a conversation file,
    as `patchkv diff` and `patchkv demo` read them.
    """
    from patchkv_agents.cli.version_view import print_version, version_document

    with open_thread(database, thread, namespace) as reader:
        selected = reader.version(version)
        if as_json:
            typer.echo(json.dumps(version_document(reader, selected, contents=True)))
            return
        console = new_console()
        print_version(console, reader, selected)
        _print_contents(console, selected, None if full else _EXCERPT)


def _print_contents(console: Console, version: ContextVersion, limit: int | None) -> None:
    from rich.text import Text

    from patchkv_agents.context.excerpts import one_line
    from patchkv_agents.context.explaining.diagnosis import tool_name

    if version.template_args.text != "{}":
        console.print(f"  template arguments: {_printable(version.template_args.text, limit)}")
    if version.tools:
        names = ", ".join(tool_name(tool) for tool in version.tools)
        console.print(f"  tools: {one_line(names, 10 * _EXCERPT)}")
    for index, message in enumerate(version.messages):
        console.print()
        console.print(Text(_title(index, message), style="bold"))
        for name, text in _texts(message):
            if name:
                console.print(Text(f"  {name}:", style="cyan"))
            for line in _printable(text, limit).splitlines():
                console.print(f"  {line}")


def _title(index: int, message: Message) -> str:
    from patchkv_agents.context.excerpts import one_line

    names = [("name", message.name), ("answers", message.tool_call_id), ("id", message.id)]
    notes = [f"{what} {one_line(name, _EXCERPT)}" for what, name in names if name]
    return f"{index} {message.role}" + (f" ({', '.join(notes)})" if notes else "")


def _texts(message: Message) -> list[tuple[str, str]]:
    from patchkv_agents.context.excerpts import one_line

    texts = [("reasoning", message.reasoning or "")]
    if isinstance(message.content, tuple):
        for part in message.content:
            value = part.load()
            is_text = value.get("type") == "text"
            texts.append(("", str(value["text"]) if is_text else part.text))
    else:
        texts.append(("", message.content or ""))
    texts += [
        (f"calls {one_line(call.name, _EXCERPT)}", call.arguments_json)
        for call in message.tool_calls
    ]
    return [(name, text) for name, text in texts if text]


def _printable(text: str, limit: int | None) -> str:
    """The text without control characters, line breaks and tabs kept; cut at `limit`."""
    shown = text if limit is None else text[:limit]
    clean = "".join(c for c in shown.replace("\t", "    ") if c.isprintable() or c == "\n")
    return clean if shown == text else f"{clean} ... ({len(text):,} characters; --full shows all)"
