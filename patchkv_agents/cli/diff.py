"""`patchkv diff`: what changed between two versions of a context, in messages and in tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from patchkv_agents.alignment import Alignment
    from patchkv_agents.context import Conversation, Edit, Message, RenderedContext

_STYLES = {
    "unchanged": "dim",
    "changed": "yellow",
    "moved": "cyan",
    "new": "green",
    "gone": "red",
    "template": "dim",
}


def diff(
    old: Annotated[Path, typer.Argument(help="The conversation before the edit (JSON).")],
    new: Annotated[Path, typer.Argument(help="The conversation after the edit (JSON).")],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="Whose tokenizer and chat template count: smollm2 (embedded), a folder, "
            "or a Transformers model id.",
        ),
    ] = "smollm2",
    min_run: Annotated[
        int, typer.Option(min=1, help="Shorter matches inside changed text do not count.")
    ] = 16,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    """Show what changed between two versions of a context, and what can be recovered.

    OLD and NEW are files with {"messages": [...], "tools": [...]} in OpenAI form, or with a list
    of messages. Both are rendered with the generation prompt, as for a call of the model.
    """
    from rich.console import Console

    from patchkv_agents.alignment import align
    from patchkv_agents.context import infer_edits, load_conversation, render

    before, after = load_conversation(old), load_conversation(new)
    with Console(stderr=True).status(f"Loading the tokenizer of {model}"):
        from patchkv_agents.engine.loading import load_tokenizer

        tokenizer = load_tokenizer(model)
    rendered = [
        render(version, tokenizer, add_generation_prompt=True) for version in (before, after)
    ]
    alignment = align(rendered[0].token_ids, rendered[1].token_ids, min_run=min_run)
    edits = infer_edits(before, after)
    unverified = [
        f"{path}: {context.reason}"
        for path, context in zip((old, new), rendered, strict=True)
        if not context.verified
    ]
    if as_json:
        typer.echo(json.dumps(document(alignment, edits, verified=not unverified)))
        return
    console = Console(highlight=False)
    console.width = max(console.width, 80)
    console.print(_table(message_rows(before, after, rendered[0], rendered[1], alignment, edits)))
    _print_summary(console, alignment, edits)
    for reason in unverified:
        typer.echo(f"Message spans are not certain, recovery would be exact: {reason}", err=True)


def document(alignment: Alignment, edits: Sequence[Edit], *, verified: bool) -> dict[str, Any]:
    """The JSON document: ranges are half-open, in tokens.

    An edit has one row; `old_index` and `new_index` are its first old and new message, null where
    there is none (an edit of the tool list has neither).
    """
    return {
        "tokens_old": alignment.tokens_old,
        "tokens_new": alignment.tokens_new,
        "prefix": alignment.prefix,
        "runs": [[run.old_start, run.new_start, run.length] for run in alignment.runs],
        "hunks": [hunk.to_dict() for hunk in alignment.hunks],
        "recoverable_tokens": alignment.recoverable_tokens,
        "edits": [
            {"kind": edit.kind.value, "old_index": edit.old_index, "new_index": edit.new_index}
            for edit in edits
        ],
        "verified": verified,
    }


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A line of the table: a message of the new version, or one that is gone from it.

    `old` and `new` are message indices (`old` several where messages were merged), the counts
    are tokens: of the old messages, of the new message, and of the new message with old state.
    """

    state: str
    old: tuple[int, ...]
    new: int | None
    role: str
    tokens_old: int | None
    tokens_new: int | None
    aligned: int
    text: str


def message_rows(
    before: Conversation,
    after: Conversation,
    old: RenderedContext,
    new: RenderedContext,
    alignment: Alignment,
    edits: Sequence[Edit],
) -> list[MessageRow]:
    """One row for each new message in order, with those that are gone where they used to be.

    A message that no edit names but that renders to other tokens than before (templates rewrite
    earlier turns) counts as changed. The last row, `template`, is what belongs to no message.
    """
    aligned = alignment.position_map() >= 0
    edits = [edit for edit in edits if edit.scope == "messages"]
    edit_at = {j: edit for edit in edits for j in edit.new_indices}
    named = {i for edit in edits for i in edit.old_indices}
    untouched = [i for i in range(len(before.messages)) if i not in named]
    gone = sorted(i for edit in edits if not edit.new_indices for i in edit.old_indices)

    def gone_row(i: int) -> MessageRow:
        message, size = before.messages[i], _size(old.message_spans[i])
        return MessageRow("gone", (i,), None, message.role, size, None, 0, _excerpt(message))

    rows: list[MessageRow] = []
    for j, message in enumerate(after.messages):
        edit = edit_at.get(j)
        olds: tuple[int, ...] = ()
        if edit is not None:
            olds = edit.old_indices
        elif untouched:
            olds = (untouched.pop(0),)
        start, stop = new.message_spans[j]
        if edit is None and olds:
            a, b = old.message_spans[olds[0]]
            same = old.token_ids[a:b].tolist() == new.token_ids[start:stop].tolist()
            state = "unchanged" if same else "changed"
        elif edit is not None and edit.kind.value == "move":
            state = "moved"
        else:
            state = "changed" if olds else "new"
        if state != "moved":
            while gone and olds and gone[0] < olds[0]:
                rows.append(gone_row(gone.pop(0)))
        # Where several messages became several, the first row counts the old ones.
        counted = olds if edit is None or j == edit.new_index else ()
        tokens_old = sum(_size(old.message_spans[i]) for i in counted) if counted else None
        rows.append(
            MessageRow(
                state,
                olds,
                j,
                message.role,
                tokens_old,
                stop - start,
                int(aligned[start:stop].sum()),
                _excerpt(message),
            )
        )
    rows += [gone_row(i) for i in gone]
    outside = aligned.copy()
    for start, stop in new.message_spans:
        outside[start:stop] = False
    rest_old, rest_new = (
        len(context.token_ids) - sum(_size(span) for span in context.message_spans)
        for context in (old, new)
    )
    if rest_old or rest_new:
        rows.append(
            MessageRow("template", (), None, "", rest_old, rest_new, int(outside.sum()), "")
        )
    return rows


def _size(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _excerpt(message: Message) -> str:
    """The start of a message on one line, free of control characters."""
    content = message.content
    if isinstance(content, str):
        text = content
    else:
        text = " ".join(str(part.load().get("text", "[part]")) for part in content or ())
    text = " ".join((text or message.reasoning or "")[:400].split())
    calls = ", ".join(f"{call.name}(...)" for call in message.tool_calls)
    return "".join(c for c in " ".join([text, calls]).strip() if c.isprintable())


def _table(rows: Sequence[MessageRow]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("old", "new"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("role", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tokens", "kept"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("text")  # the only one that may shrink, so it is its cells that do not wrap
    for row in rows:
        old = f"{row.old[0]}-{row.old[-1]}" if len(row.old) > 1 else "".join(map(str, row.old))
        sizes = [size for size in (row.tokens_old, row.tokens_new) if size is not None]
        cells = [
            old,
            "" if row.new is None else str(row.new),
            row.role,
            row.state,
            " -> ".join(f"{size:,}" for size in dict.fromkeys(sizes)),
            "" if row.tokens_new is None else f"{row.aligned:,}",
        ]
        # Text objects: contents may hold what looks like markup.
        excerpt = Text(row.text, no_wrap=True, overflow="ellipsis")
        table.add_row(*map(Text, cells), excerpt, style=_STYLES[row.state])
    return table


def _print_summary(console: Console, alignment: Alignment, edits: Sequence[Edit]) -> None:
    after_prefix = alignment.tokens_new - alignment.prefix
    fresh = after_prefix - alignment.recoverable_tokens
    share = alignment.recoverable_tokens / after_prefix if after_prefix else 0.0
    lines = [f"Tokens: {alignment.tokens_old:,} old, {alignment.tokens_new:,} new."]
    if not after_prefix:
        lines.append("All new tokens are a prefix of the old ones: nothing is lost.")
    else:
        lines += [
            f"Common prefix: {alignment.prefix:,} tokens. "
            f"An exact prefix cache must recompute what follows: {after_prefix:,} tokens.",
            f"State can be recovered for {alignment.recoverable_tokens:,} of these ({share:.1%}); "
            f"the others are new: {fresh:,}.",
        ]
    if edits:
        lines.append("Inferred edits:")
        lines += [f"  {_describe(edit)}" for edit in edits]
    else:
        lines.append("No edits: the two contexts are the same.")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _describe(edit: Edit) -> str:
    where = [
        f"{name} {'message' if len(indices) == 1 else 'messages'} {', '.join(map(str, indices))}"
        for name, indices in (("old", edit.old_indices), ("new", edit.new_indices))
        if indices
    ]
    place = " -> ".join(where) if edit.scope == "messages" else edit.scope.replace("_", " ")
    return f"{edit.kind.value}: {place}{' (in part)' if edit.partial else ''}"
