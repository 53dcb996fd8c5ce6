"""The English question-answering tasks of LongBench and LongBench-E, JSONL.

Records are `{"input", "context", "answers", "dataset", "language", "_id"}` (THUDM/LongBench). The
context is one text: numbered passages in the multi-document tasks, worked examples in TriviaQA
(its input holds the passage that is asked about), one document in the others.
"""

from __future__ import annotations

import re

from patchkv_evals.datasets.fields import Record, text, texts
from patchkv_evals.datasets.rows import Draft, Passage, RowError
from patchkv_evals.text import flat, mentions

MULTI_DOCUMENT = ("hotpotqa", "2wikimqa", "musique")
SINGLE_DOCUMENT = ("qasper", "multifieldqa_en", "narrativeqa")
TASKS = (*MULTI_DOCUMENT, *SINGLE_DOCUMENT, "triviaqa")

_PASSAGE = re.compile(r"(?:^|\n)Passage \d+:\n")
_EXAMPLE = re.compile(r"Passage:\s*(.*?)\s*\nQuestion:\s*(.*?)\s*\nAnswer:", re.DOTALL)
_LONGEST_TITLE = 150


def task_of(record: Record) -> str:
    """The task of a record. LongBench-E's names end in `_e`.

    Raises:
        RowError: the task is not one of `TASKS`.
    """
    task = text(record, "dataset").removesuffix("_e")
    if task not in TASKS:
        raise RowError(f"task {task!r} is not question answering in English")
    return task


def read(record: Record, dataset: str) -> Draft:
    """Read one record; which passages are gold is known for TriviaQA alone.

    Raises:
        RowError: a field or the context has another shape.
    """
    task = task_of(record)
    context, asked = text(record, "context"), text(record, "input")
    draft = Draft(text(record, "_id"), dataset, asked, texts(record, "answers"))
    if task == "triviaqa":
        _read_examples(draft, context, asked)
    elif task in SINGLE_DOCUMENT:
        draft.passages.append(Passage("", context.strip()))
    else:
        head, *passages = _PASSAGE.split(context)
        if head.strip() or not passages:
            raise RowError("the context does not consist of numbered passages")
        draft.passages += [_titled(passage.strip()) for passage in passages]
    return draft


def _read_examples(draft: Draft, context: str, asked: str) -> None:
    target = _EXAMPLE.search(asked)
    if target is None:
        raise RowError("the input does not consist of a passage and a question")
    passage, draft.question = target.groups()
    draft.passages.append(Passage("", passage, True))
    for distractor, _ in _EXAMPLE.findall(context):
        gold = mentions(flat(distractor), draft.answers)
        draft.passages.append(Passage("", distractor, gold))


def _titled(passage: str) -> Passage:
    """Multi-document tasks put the title in the first line."""
    title, _, rest = passage.partition("\n")
    if rest.strip() and len(title) <= _LONGEST_TITLE:
        return Passage(title.strip(), rest.strip())
    return Passage("", passage)
