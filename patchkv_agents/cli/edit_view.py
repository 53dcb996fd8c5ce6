"""Output of edits: lines for people, objects for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from patchkv_agents.context import Edit
from patchkv_agents.context.excerpts import one_line

_LONGEST_NAME = 80


def ranges(indices: Sequence[int]) -> str:
    """Ascending indices, neighbours as a range: `2-5, 9`."""
    runs = []
    for _, group in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        run = [index for _, index in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(runs)


def edit_lines(edits: Sequence[Edit], *, origin: bool = True) -> Iterator[str]:
    """Edits as lines: kind, places and, with `origin`, where the records come from.

    Neighbours that differ in nothing but their places share a line.
    """
    for (kind, scope, partial, notes), group in groupby(edits, key=_alike):
        same = list(group)
        where = [
            f"{side} {'message' if len(indices) == 1 else 'messages'} {ranges(indices)}"
            for side, indices in (
                ("old", [i for edit in same for i in edit.old_indices]),
                ("new", [j for edit in same for j in edit.new_indices]),
            )
            if indices
        ]
        place = " -> ".join(where) if scope == "messages" else scope.replace("_", " ")
        line = f"{kind}: {place or 'nothing answered to it'}{' (in part)' if partial else ''}"
        yield f"{line}; {notes}" if origin else line


def _alike(edit: Edit) -> tuple[str, str, bool, str]:
    notes = ["declared" if edit.declared else "inferred"]
    if edit.author is not None:
        notes[0] += f" by {one_line(edit.author, _LONGEST_NAME)}"
    notes += [
        note
        for note, holds in (
            ("corrected", edit.corrected),
            ("forget", edit.forget),
            ("in the request only", edit.where == "request"),
        )
        if holds
    ]
    return edit.kind.value, edit.scope, edit.partial, ", ".join(notes)


def edit_document(edit: Edit) -> dict[str, Any]:
    """An edit as JSON values."""
    return {
        "id": edit.id,
        "kind": edit.kind.value,
        "scope": edit.scope,
        "where": edit.where,
        "old_index": edit.old_index,
        "new_index": edit.new_index,
        "old_indices": list(edit.old_indices),
        "new_indices": list(edit.new_indices),
        "message_ids": list(edit.message_ids),
        "tool_call_ids": list(edit.tool_call_ids),
        "before_hash": edit.before_hash,
        "after_hash": edit.after_hash,
        "declared": edit.declared,
        "corrected": edit.corrected,
        "forget": edit.forget,
        "partial": edit.partial,
        "author": edit.author,
        "idempotency_key": edit.idempotency_key,
        "checkpoint_id": edit.checkpoint_id,
        "metadata": edit.metadata.load(),
        "time_s": edit.time_s,
    }
