"""HotpotQA and 2WikiMultihopQA, which share one format.

Official files hold a list of `{"_id", "question", "answer", "supporting_facts": [[title, number]],
"context": [[title, [sentence]]]}` (https://hotpotqa.github.io, README of Alab-NII/2wikimultihop).
Hugging Face's copies have the same as objects, and call the id `id`.
"""

from __future__ import annotations

import html
from typing import Any

from patchkv_evals.datasets.fields import Record, items, text
from patchkv_evals.datasets.rows import Draft, Passage, RowError, SupportingFact


def read(record: Record, dataset: str) -> Draft:
    """Read one record. Titles are unescaped: HotpotQA writes `Simon &amp; Simon`.

    Raises:
        RowError: a field has another shape; test sets have no answers and give this too.
    """
    context = [_pair(item, "title", "sentences", "content") for item in items(record, "context")]
    named = [_pair(item, "title", "sent_id") for item in items(record, "supporting_facts")]
    draft = Draft(
        text(record, "_id", "id"), dataset, text(record, "question"), [text(record, "answer")]
    )
    golds = {title for title, _ in named}
    by_title: dict[str, list[str]] = {}
    for title, lines in context:
        if not isinstance(lines, list | tuple) or not all(isinstance(s, str) for s in lines):
            raise RowError("a passage is not a list of sentences")
        by_title.setdefault(title, list(lines))
        is_gold = title in golds if golds else None
        draft.passages.append(Passage(html.unescape(title), _join(lines), is_gold))
    for title, number in named:
        lines = by_title.get(title, [])
        if isinstance(number, int) and 0 <= number < len(lines):
            draft.facts.append(SupportingFact(html.unescape(title), lines[number].strip()))
        else:  # HotpotQA has some of these
            draft.left_out.append(
                (f"supporting fact {title!r}, {number}", "supporting fact names no sentence")
            )
    return draft


def _pair(item: Any, *names: str) -> tuple[str, Any]:
    """A title and what belongs to it, from a list of both or an object."""
    if isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str):
        return item[0], item[1]
    if isinstance(item, dict) and isinstance(item.get(names[0]), str):
        return item[names[0]], next((item[name] for name in names[1:] if name in item), None)
    raise RowError("a member of 'context' or 'supporting_facts' is not a title with something")


def _join(lines: list[str] | tuple[str, ...]) -> str:
    """One text; HotpotQA's sentences begin with their space, 2Wiki's do not."""
    joined = ""
    for line in lines:
        joined += line if not joined or line[:1].isspace() else f" {line}"
    return joined.strip()
