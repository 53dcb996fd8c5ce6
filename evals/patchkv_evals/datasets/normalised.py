"""The form in which this project passes QA rows around, JSONL.

`{"id", "question", "answers": [...], "paragraphs": [{"title", "text", "is_supporting": true, false
or null}]}`; more fields do no harm. The simplest form for data of one's own.
"""

from __future__ import annotations

import html

from patchkv_evals.datasets.fields import Record, items, text, texts
from patchkv_evals.datasets.rows import Draft, Passage, RowError


def read(record: Record, dataset: str) -> Draft:
    """Read one record.

    Raises:
        RowError: a field has another shape.
    """
    draft = Draft(text(record, "id"), dataset, text(record, "question"), texts(record, "answers"))
    for paragraph in items(record, "paragraphs"):
        if not isinstance(paragraph, dict):
            raise RowError("a paragraph is not an object")
        gold = paragraph.get("is_supporting")
        if gold is not None and not isinstance(gold, bool):
            raise RowError("field 'is_supporting' is not true, false or null")
        title = html.unescape(text(paragraph, "title"))
        draft.passages.append(Passage(title, text(paragraph, "text"), gold))
    return draft
