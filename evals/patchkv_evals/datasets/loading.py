"""Loads rows from a file, whatever its format, or through Hugging Face `datasets`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from patchkv_evals.datasets import hotpot, longbench, musique, normalised, triviaqa
from patchkv_evals.datasets.fields import Record, text
from patchkv_evals.datasets.rows import Draft, LoadedRows, QARow, RowError, Skipped
from patchkv_evals.errors import DataError

DATASETS = ("hotpotqa", "2wikimqa", "triviaqa", "musique", "longbench")
"""Names of the data sets. Rows of LongBench are named `longbench/` and their task."""

_HUB = {
    "hotpotqa": ("hotpotqa/hotpot_qa", "distractor", "validation"),
    "2wikimqa": ("framolfese/2WikiMultihopQA", None, "validation"),
    "triviaqa": ("mandarjoshi/trivia_qa", "rc", "validation"),
    "musique": ("dgslibisey/MuSiQue", None, "validation"),
    # THUDM's own repository needs a loading script, which `datasets` 4 refuses to run; this is the
    # copy that lm-evaluation-harness uses.
    "longbench": ("Xnhyacinth/LongBench", None, "test"),
}
"""Repository, configuration and split on the Hugging Face hub."""


def load_rows(
    path: str | Path,
    dataset: str,
    *,
    limit: int | None = None,
    evidence: str | Path | None = None,
) -> LoadedRows:
    """Load rows from a file: official or normalised form, JSON or JSON lines.

    The form is told by the records themselves. What cannot be used is left out and reported.

    Args:
        path: the file.
        dataset: one of `DATASETS`.
        limit: stop after so many good rows.
        evidence: TriviaQA's folder of documents; without it, `evidence` beside the file or beside
            its folder.

    Raises:
        DataError: the file cannot be read, the data set is not known, or TriviaQA's documents are
            nowhere to be found.
    """
    _check_name(dataset)
    file = Path(path)
    folder = Path(evidence) if evidence is not None else _evidence_beside(file)
    return _collect(_records(file), dataset, limit, folder)


def load_hub(
    dataset: str,
    *,
    repository: str | None = None,
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    limit: int | None = None,
) -> LoadedRows:
    """Load rows through Hugging Face `datasets`, streaming, so that a limit also limits download.

    Args:
        dataset: one of `DATASETS`.
        repository: a repository on the hub; by default one that is known to hold the data set.
        config: its configuration; for LongBench the task, such as `hotpotqa` or `hotpotqa_e`.
        split: by default the one with answers that is not for training.
        revision: branch, tag or commit.
        limit: stop after so many good rows.

    Raises:
        DataError: `datasets` is not installed, the data set is not known, or it cannot be loaded.
    """
    _check_name(dataset)
    try:
        hub: Any = import_module("datasets")
    except ImportError:
        raise DataError(
            "Loading by name needs Hugging Face's package: pip install 'patchkv-agents[data]', "
            "or pass the path of a file."
        ) from None
    known, known_config, known_split = _HUB[dataset]
    name = repository or known
    if repository is None:
        config = config or known_config
    if dataset == "longbench" and config is None:
        raise DataError(f"Name LongBench's task as config, one of {', '.join(longbench.TASKS)}.")
    try:
        records = hub.load_dataset(
            name, config, split=split or known_split, revision=revision, streaming=True
        )
        return _collect(records, dataset, limit, None)
    except DataError:
        raise
    except Exception as error:  # the package raises many kinds, for network, names and formats
        raise DataError(
            f"Hugging Face data set {name} cannot be loaded: {error} Check name and network, "
            "or download the official file and pass its path."
        ) from error


def _check_name(dataset: str) -> None:
    if dataset not in DATASETS:
        raise DataError(f"Data set {dataset!r} is not known; choose of {', '.join(DATASETS)}.")


def _evidence_beside(file: Path) -> Path | None:
    folders = (folder / "evidence" for folder in (file.parent, file.parent.parent))
    return next((folder for folder in folders if folder.is_dir()), None)


def _records(path: Path) -> Iterator[Any]:
    """The records of a file; a line that is not JSON comes as a ValueError, not raised."""
    try:
        if path.suffix != ".jsonl":
            try:
                whole = json.loads(path.read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                if "Extra data" not in error.msg:
                    raise
            else:
                yield from _members(whole, path)
                return
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if line.strip():
                    yield _parse(line)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} cannot be read as JSON or JSON lines: {error}") from error


def _members(whole: Any, path: Path) -> list[Any]:
    if isinstance(whole, dict) and isinstance(whole.get("Data"), list):
        whole = whole["Data"]  # TriviaQA
    if isinstance(whole, dict):
        whole = [whole]
    if not isinstance(whole, list):
        raise DataError(f"{path} holds neither a list of records nor an object.")
    return whole


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return error


def _collect(
    records: Iterable[Any], dataset: str, limit: int | None, evidence: Path | None
) -> LoadedRows:
    rows: dict[str, QARow] = {}
    skipped: list[Skipped] = []
    for index, record in enumerate(records):
        if limit is not None and len(rows) >= limit:
            break
        draft = None
        try:
            draft = _read(record, dataset, evidence)
            row = draft.finish()
            if row.id in rows:
                raise RowError("another row before it has the same id")
            rows[row.id] = row
        except RowError as error:
            skipped.append(Skipped(index, _id_of(record), str(error)))
        if draft is not None:
            skipped += [Skipped(index, draft.id, why, part) for part, why in draft.left_out]
    return LoadedRows(tuple(rows.values()), tuple(skipped))


def _read(record: Any, dataset: str, evidence: Path | None) -> Draft:
    """Read a record in the form that its fields show."""
    if isinstance(record, json.JSONDecodeError):
        raise RowError("the line is not JSON")
    if not isinstance(record, dict):
        raise RowError("the record is not an object")
    if record.keys() >= {"input", "context", "answers"}:
        return longbench.read(record, f"longbench/{longbench.task_of(record)}")
    if record.keys() >= {"paragraphs", "answers"}:
        return normalised.read(record, dataset)
    if "paragraphs" in record:
        return musique.read(record, dataset)
    if record.keys() >= {"Question", "QuestionId"}:
        if evidence is None:
            raise DataError(
                "TriviaQA's files only name their documents: pass the download's folder "
                "'evidence' (with 'wikipedia' and 'web' in it)."
            )
        return triviaqa.read(record, dataset, evidence)
    if record.keys() & {"entity_pages", "search_results"}:
        return triviaqa.read_hub(record, dataset)
    if record.keys() >= {"question", "context"}:
        return hotpot.read(record, dataset)
    raise RowError("the fields are those of no known format")


def _id_of(record: Record) -> str:
    try:
        return text(record, "id", "_id", "QuestionId", "question_id")
    except (RowError, AttributeError):
        return ""
