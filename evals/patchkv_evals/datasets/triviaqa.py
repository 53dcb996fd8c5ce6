"""TriviaQA, reading comprehension (RC).

Official files are `{"Data": [{"QuestionId", "Question", "Answer": {"Value", "Aliases",
"NormalizedAliases", "HumanAnswers"}, "EntityPages": [{"Title", "Filename"}], "SearchResults":
[...]}]}`; the documents lie as text in `evidence/wikipedia` and `evidence/web` of the download
(https://nlp.cs.washington.edu/triviaqa, mandarjoshi90/triviaqa). Hugging Face's copy has the
documents inside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patchkv_evals.datasets.fields import Record, items, text, texts
from patchkv_evals.datasets.rows import Draft, Passage, RowError
from patchkv_evals.text import flat, mentions

_PAGES = (("EntityPages", "wikipedia"), ("SearchResults", "web"))
_HUB_PAGES = (("entity_pages", "wiki_context"), ("search_results", "search_context"))


def read(record: Record, dataset: str, evidence: Path) -> Draft:
    """Read one record of an official file with its documents.

    A document is gold if it mentions an answer, which is how the data set itself says it.

    Args:
        record: a member of `Data`.
        dataset: the row's data set.
        evidence: the download's folder `evidence`.

    Raises:
        RowError: a field has another shape.
    """
    answer = record.get("Answer")
    if not isinstance(answer, dict):
        raise RowError("no field 'Answer'; test sets have none")
    answers = [text(answer, "Value"), *texts(answer, "Aliases"), *texts(answer, "HumanAnswers")]
    answers += _not_covered(texts(answer, "NormalizedAliases"), answers)
    draft = Draft(text(record, "QuestionId"), dataset, text(record, "Question"), answers)
    for name, folder in _PAGES:
        for page in _objects(record, name):
            file = evidence / folder / text(page, "Filename")
            try:
                document = file.read_text(encoding="utf-8", errors="replace")
            except OSError:
                draft.left_out.append((f"{folder}/{page['Filename']}", "document is missing"))
                continue
            _add(draft, text(page, "Title"), document)
    return draft


def read_hub(record: Record, dataset: str) -> Draft:
    """Read one record of `mandarjoshi/trivia_qa`, with documents inside.

    Raises:
        RowError: a field has another shape.
    """
    answer = record.get("answer")
    if not isinstance(answer, dict):
        raise RowError("no field 'answer'")
    answers = [text(answer, "value"), *texts(answer, "aliases")]
    answers += _not_covered(texts(answer, "normalized_aliases"), answers)
    draft = Draft(text(record, "question_id"), dataset, text(record, "question"), answers)
    for name, content in _HUB_PAGES:
        for page in _objects(record, name):
            _add(draft, text(page, "title"), text(page, content))
    return draft


def _objects(record: Record, name: str) -> list[dict[str, Any]]:
    pages = items(record, name)
    if not all(isinstance(page, dict) for page in pages):
        raise RowError(f"a member of {name!r} is not an object")
    return pages


def _add(draft: Draft, title: str, document: str) -> None:
    gold = mentions(flat(document), draft.answers)
    draft.passages.append(Passage(title, document.strip(), gold))


def _not_covered(normalized: list[str], answers: list[str]) -> list[str]:
    """Normalised aliases that stand for none of the answers; most repeat one."""
    covered = {flat(answer) for answer in answers}
    return [alias for alias in normalized if flat(alias) not in covered]
