"""MuSiQue, JSONL.

Records are `{"id", "question", "answer", "answer_aliases", "answerable", "paragraphs":
[{"title", "paragraph_text", "is_supporting"}]}` (StonyBrookNLP/musique,
raw_data_to_official_format.py). Of MuSiQue-Full the unanswerable half is left out.
"""

from __future__ import annotations

from patchkv_evals.datasets.fields import Record, items, text, texts
from patchkv_evals.datasets.rows import Draft, Passage, RowError


def read(record: Record, dataset: str) -> Draft:
    """Read one record.

    Raises:
        RowError: a field has another shape, or the question has no answer in the passages.
    """
    if record.get("answerable") is False:
        raise RowError("not answerable from its passages")
    draft = Draft(
        text(record, "id"),
        dataset,
        text(record, "question"),
        [text(record, "answer"), *texts(record, "answer_aliases")],
    )
    for paragraph in items(record, "paragraphs"):
        if not isinstance(paragraph, dict):
            raise RowError("a paragraph is not an object")
        gold = paragraph.get("is_supporting")
        draft.passages.append(
            Passage(
                text(paragraph, "title"),
                text(paragraph, "paragraph_text"),
                gold if isinstance(gold, bool) else None,
            )
        )
    return draft
