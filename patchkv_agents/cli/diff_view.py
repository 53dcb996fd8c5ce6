"""Terminal output of `patchkv diff`: a row for each message, and what the edit costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchkv_agents.alignment import Alignment
from patchkv_agents.cli.edit_view import edit_lines, ranges
from patchkv_agents.cli.tokens import ModelTokens
from patchkv_agents.console import NARROW, plural
from patchkv_agents.context import Edit, Message, RenderedContext
from patchkv_agents.context.changes.matching import Matching
from patchkv_agents.context.excerpts import one_line

_STYLES = {
    "unchanged": "dim",
    "changed": "yellow",
    "moved": "cyan",
    "new": "green",
    "gone": "red",
    "template": "dim",
}
_EXCERPT = 200


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A row of the table: a message of the new version, or one that was removed.

    `old` and `new` are message indices (`old` several where messages were merged), the counts
    are tokens: of the old messages, of the new message, of the new message with old state in
    place (`kept`) and with old state from elsewhere (`moved`).
    """

    state: str
    old: tuple[int, ...]
    new: int | None
    role: str
    tokens_old: int | None
    tokens_new: int | None
    kept: int
    moved: int
    text: str


def message_rows(
    old_messages: Sequence[Message],
    new_messages: Sequence[Message],
    old: RenderedContext,
    new: RenderedContext,
    alignment: Alignment,
    matching: Matching,
) -> list[MessageRow]:
    """One row for each new message in order, and for removed ones at their old place.

    A message whose content is the same but that renders to other tokens than before (templates
    rewrite earlier turns) counts as changed. The last row, `template`, is what belongs to no
    message.
    """
    in_place = alignment.position_map() >= 0
    anywhere = alignment.position_map(moves=True) >= 0
    kept = dict.fromkeys((j for _, j in matching.kept), "unchanged")
    states = {**kept, **dict.fromkeys((j for _, j in matching.moved), "moved")}
    olds_of: dict[int, tuple[int, ...]] = {
        j: (i,) for i, j in (*matching.kept, *matching.edited, *matching.moved)
    }
    olds_of.update((j, olds) for olds, j in matching.summarized)
    gone = sorted(matching.removed)

    def gone_row(i: int) -> MessageRow:
        message, size = old_messages[i], _size(old.message_spans[i])
        return MessageRow("gone", (i,), None, message.role, size, None, 0, 0, _excerpt(message))

    rows: list[MessageRow] = []
    for j, message in enumerate(new_messages):
        olds = olds_of.get(j, ())
        state = states.get(j, "changed" if olds else "new")
        start, stop = new.message_spans[j]
        if state == "unchanged":
            a, b = old.message_spans[olds[0]]
            if old.token_ids[a:b].tolist() != new.token_ids[start:stop].tolist():
                state = "changed"
        if state != "moved":
            while gone and olds and gone[0] < olds[0]:
                rows.append(gone_row(gone.pop(0)))
        sizes = [_size(old.message_spans[i]) for i in olds]
        here = int(in_place[start:stop].sum())
        rows.append(
            MessageRow(
                state,
                olds,
                j,
                message.role,
                sum(sizes) if sizes else None,
                stop - start,
                here,
                int(anywhere[start:stop].sum()) - here,
                _excerpt(message),
            )
        )
    rows += [gone_row(i) for i in gone]
    outside_place, outside_any = in_place.copy(), anywhere.copy()
    for start, stop in new.message_spans:
        outside_place[start:stop] = outside_any[start:stop] = False
    rest_old, rest_new = (
        len(context) - sum(map(_size, context.message_spans)) for context in (old, new)
    )
    if rest_old or rest_new:
        here = int(outside_place.sum())
        moved = int(outside_any.sum()) - here
        rows.append(MessageRow("template", (), None, "", rest_old, rest_new, here, moved, ""))
    return rows


def show(
    console: Console,
    rows: Sequence[MessageRow],
    rendered: tuple[RenderedContext, RenderedContext],
    alignment: Alignment,
    edits: Sequence[Edit],
    tokens: ModelTokens,
) -> None:
    """Print the rows, the token counts, what an exact prefix cache loses, and the edits."""
    if console.width < NARROW:
        for row in rows:
            console.print(Text(_line(row), style=_STYLES[row.state]))
    else:
        console.print(_table(rows), soft_wrap=False)
    for line in [*_summary(alignment, tokens), *_moves(rendered, alignment)]:
        console.print(line)
    console.print("Inferred edits:" if edits else "No edits: the two contexts are the same.")
    for line in edit_lines(edits, origin=False):
        console.print(f"  {line}")
    if tokens.counting is not None:
        console.print(tokens.counting)


def _size(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _excerpt(message: Message) -> str:
    """The start of a message on one line, free of control characters."""
    parts = message.content if isinstance(message.content, tuple) else ()
    other = [f"[{part.load().get('type')}]" for part in parts if part.load().get("type") != "text"]
    text = message.text[: 4 * _EXCERPT] or (message.reasoning or "")[: 4 * _EXCERPT]
    calls = ", ".join(f"{call.name}(...)" for call in message.tool_calls)
    return one_line(" ".join([text, *other, calls]), _EXCERPT)


def _counts(row: MessageRow) -> tuple[str, str]:
    sizes = [size for size in (row.tokens_old, row.tokens_new) if size is not None]
    kept = "" if row.tokens_new is None else f"{row.kept:,}"
    return " -> ".join(f"{size:,}" for size in dict.fromkeys(sizes)), kept


def _line(row: MessageRow) -> str:
    """A row for a narrow terminal."""
    place = f"{ranges(row.old)} > {'' if row.new is None else row.new}".strip()
    size, kept = _counts(row)
    kept = f", kept {kept}" if kept else ""
    moved = f", moved {row.moved:,}" if row.moved else ""
    return f"{place} {row.role} {row.state}: {size}{kept}{moved}".replace("  ", " ")


def _table(rows: Sequence[MessageRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("old", "new"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("role", "state"):
        table.add_column(heading, no_wrap=True)
    moves = any(row.moved for row in rows)
    for heading in ("tokens", "kept", "moved") if moves else ("tokens", "kept"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("text")  # the only one that may shrink, so it is its cells that do not wrap
    for row in rows:
        new = "" if row.new is None else str(row.new)
        cells = [ranges(row.old), new, row.role, row.state, *_counts(row)]
        if moves:
            cells.append(f"{row.moved:,}" if row.moved else "")
        # Text objects: contents may hold what looks like markup.
        excerpt = Text(row.text, no_wrap=True, overflow="ellipsis")
        table.add_row(*map(Text, cells), excerpt, style=_STYLES[row.state])
    return table


def _summary(alignment: Alignment, tokens: ModelTokens) -> list[str]:
    behind = alignment.tokens_new - alignment.prefix
    same = alignment.recoverable_tokens
    about = "about " if tokens.estimate else ""
    lines = [f"Tokens: {about}{alignment.tokens_old:,} old, {about}{alignment.tokens_new:,} new."]
    if not behind:
        return [*lines, "All new tokens are a prefix of the old ones: nothing is lost."]
    lines.append(
        f"Common prefix: {alignment.prefix:,} tokens. "
        f"An exact prefix cache must recompute what follows: {behind:,} tokens."
    )
    if tokens.counting is None:
        recovered = f"State can be recovered for {same:,} of these ({same / behind:.1%})"
    else:
        recovered = f"{same:,} of these ({same / behind:.1%}) are the same as before"
    return [*lines, f"{recovered}; the others are new: {behind - same:,}."]


def _moves(rendered: tuple[RenderedContext, RenderedContext], alignment: Alignment) -> list[str]:
    old, new = rendered
    return [
        f"  {plural(move.length, 'token')} of these stood elsewhere: "
        f"{_place(old, move.old_start)} -> {_place(new, move.new_start)}"
        for move in alignment.moves
    ]


def _place(context: RenderedContext, token: int) -> str:
    for index, (start, stop) in enumerate(context.message_spans):
        if start <= token < stop:
            return f"message {index}"
    return "template"
