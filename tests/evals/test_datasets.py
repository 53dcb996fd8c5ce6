"""Rows of our own writing, in the forms of the official files and of Hugging Face's copies."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from patchkv_evals.datasets import LoadedRows, Passage, SupportingFact, load_hub, load_rows
from patchkv_evals.errors import DataError

HOTPOT = {
    "_id": "h1",
    "question": "Which pier has the lamp of Harrow &amp; Sons?",
    "answer": "North Pier",
    "type": "bridge",
    "level": "hard",
    "supporting_facts": [["Harrow &amp; Sons", 1], ["North Pier", 0], ["North Pier", 7]],
    "context": [
        ["Harrow &amp; Sons", ["They made lamps.", " One stands on a pier.", " It is green."]],
        ["North Pier", ["The pier has a lamp."]],
        ["South Pier", ["It has none."]],
    ],
}
TWO_WIKI = {
    "_id": "w1",
    "question": "Who is the mother of the director of Fog?",
    "answer": "Ada Lind",
    "type": "compositional",
    "supporting_facts": [["Fog", 0], ["Olaf Lind", 0]],
    "evidences": [["Fog", "director", "Olaf Lind"], ["Olaf Lind", "mother", "Ada Lind"]],
    "context": [
        ["Fog", ["Fog is a film by Olaf Lind.", "It is short."]],
        ["Olaf Lind", ["Olaf is a son of Ada Lind."]],
    ],
}
MUSIQUE = {
    "id": "2hop__1_2",
    "question": "When was the maker of the lamp founded?",
    "question_decomposition": [
        {"id": 1, "question": "maker", "answer": "Harrow", "paragraph_support_idx": 1}
    ],
    "answer": "1840",
    "answer_aliases": ["the year 1840"],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "Pier", "paragraph_text": "A pier.", "is_supporting": False},
        {"idx": 1, "title": "Harrow", "paragraph_text": "Founded 1840.", "is_supporting": True},
    ],
}
TRIVIAQA = {
    "Answer": {
        "Aliases": ["Green Lamp", "The Green Lamp"],
        "NormalizedAliases": ["green lamp", "lamp of harrow"],
        "Value": "Green Lamp",
        "HumanAnswers": ["the lamp"],
    },
    "EntityPages": [{"Title": "Harrow", "Filename": "Harrow.txt", "DocSource": "TagMe"}],
    "Question": "What stands on the pier?",
    "QuestionId": "tc_1",
    "SearchResults": [
        {"Title": "Piers", "Filename": "1/1_2.txt", "Rank": 0},
        {"Title": "Lost", "Filename": "1/1_3.txt", "Rank": 1},
    ],
}
LONGBENCH = {
    "input": "Which pier has a lamp?",
    "context": "Passage 1:\nNorth Pier\nIt has a lamp.\nIt is old.\n\n"
    "Passage 2:\nSouth Pier\nNone.",
    "answers": ["North Pier"],
    "length": 20,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "l1",
}
LONGBENCH_TRIVIAQA = {
    **LONGBENCH,
    "input": "Passage:\nThe green lamp stands on it.\nQuestion:\nWhat is on the pier?\nAnswer:\n",
    "context": "Passage:\nA mill.\nQuestion:\nWhat grinds?\nAnswer:\nA mill\n"
    "Passage:\nA boat.\nQuestion:\nWhat floats?\nAnswer:\nA boat",
    "answers": ["green lamp"],
    "dataset": "triviaqa_e",
    "_id": "l2",
}
NORMALISED = {
    "id": "n1",
    "question": "Which pier?",
    "answers": ["North Pier", "North Pier", "the north one"],
    "paragraphs": [
        {"title": "Piers &amp; lamps", "text": "North Pier has one.", "is_supporting": True},
        {"title": "Empty", "text": " ", "is_supporting": False},
        {"title": "Unknown", "text": "A lamp.", "is_supporting": None},
    ],
    "source": "ours",
}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadedRows]:
    """Writes records as JSON lines and loads them."""

    def write_and_load(dataset: str, *records: Any, **options: Any) -> LoadedRows:
        file = tmp_path / "rows.jsonl"
        lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
        file.write_text("\n".join(lines), encoding="utf-8")
        return load_rows(file, dataset, **options)

    return write_and_load


def test_hotpotqa(tmp_path: Path) -> None:
    file = tmp_path / "hotpot_dev_distractor_v1.json"
    file.write_text(json.dumps([HOTPOT]), encoding="utf-8")
    loaded = load_rows(file, "hotpotqa")
    (row,) = loaded.rows
    assert (row.id, row.dataset, row.answers) == ("h1", "hotpotqa", ("North Pier",))
    assert row.passages == (
        Passage("Harrow & Sons", "They made lamps. One stands on a pier. It is green.", True),
        Passage("North Pier", "The pier has a lamp.", True),
        Passage("South Pier", "It has none.", False),
    )
    assert row.facts == (
        SupportingFact("Harrow & Sons", "One stands on a pier."),
        SupportingFact("North Pier", "The pier has a lamp."),
    )
    (fact,) = loaded.skipped
    assert (fact.index, fact.id, fact.part) == (0, "h1", "supporting fact 'North Pier', 7")


def test_2wikimultihopqa_joins_its_sentences_with_spaces(load: Callable[..., LoadedRows]) -> None:
    (row,) = load("2wikimqa", TWO_WIKI).rows
    assert row.dataset == "2wikimqa"
    assert row.passages[0] == Passage("Fog", "Fog is a film by Olaf Lind. It is short.", True)
    assert [fact.sentence for fact in row.facts] == [
        "Fog is a film by Olaf Lind.",
        "Olaf is a son of Ada Lind.",
    ]


def test_musique(load: Callable[..., LoadedRows]) -> None:
    loaded = load("musique", MUSIQUE, {**MUSIQUE, "id": "other", "answerable": False})
    (row,) = loaded.rows
    assert row.answers == ("1840", "the year 1840")
    assert row.passages == (
        Passage("Pier", "A pier.", False),
        Passage("Harrow", "Founded 1840.", True),
    )
    assert [(s.id, s.reason) for s in loaded.skipped] == [
        ("other", "not answerable from its passages")
    ]


def test_triviaqa(tmp_path: Path) -> None:
    (tmp_path / "qa").mkdir()
    for name, text in (
        ("wikipedia/Harrow.txt", "Harrow made the Green Lamp of the pier.\n"),
        ("web/1/1_2.txt", "Piers, with greenery and lamps."),
    ):
        file = tmp_path / "evidence" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    file = tmp_path / "qa" / "web-dev.json"
    file.write_text(json.dumps({"Data": [TRIVIAQA], "Domain": "Web"}), encoding="utf-8")
    loaded = load_rows(file, "triviaqa")
    (row,) = loaded.rows
    # A normalised alias is kept only where it stands for no other answer.
    assert row.answers == ("Green Lamp", "The Green Lamp", "the lamp", "lamp of harrow")
    assert row.passages == (
        Passage("Harrow", "Harrow made the Green Lamp of the pier.", True),
        Passage("Piers", "Piers, with greenery and lamps.", False),
    )
    assert [(s.part, s.reason) for s in loaded.skipped] == [
        ("web/1/1_3.txt", "document is missing")
    ]


def test_triviaqa_without_its_documents_says_what_to_pass(tmp_path: Path) -> None:
    file = tmp_path / "web-dev.json"
    file.write_text(json.dumps({"Data": [TRIVIAQA]}), encoding="utf-8")
    with pytest.raises(DataError, match="folder 'evidence'"):
        load_rows(file, "triviaqa")
    loaded = load_rows(file, "triviaqa", evidence=tmp_path)
    assert not loaded.rows
    assert "no passage with text" in loaded.report()


def test_longbench(load: Callable[..., LoadedRows]) -> None:
    loaded = load(
        "longbench",
        LONGBENCH,
        LONGBENCH_TRIVIAQA,
        {**LONGBENCH, "_id": "l3", "dataset": "qasper", "context": "An article."},
        {**LONGBENCH, "_id": "l4", "dataset": "gov_report"},
        {**LONGBENCH, "_id": "l5", "context": "No passages"},
    )
    documents, trivia, article = loaded.rows
    assert documents.dataset == "longbench/hotpotqa"
    assert documents.passages == (
        Passage("North Pier", "It has a lamp.\nIt is old."),
        Passage("South Pier", "None."),
    )
    assert (trivia.dataset, trivia.question) == ("longbench/triviaqa", "What is on the pier?")
    assert trivia.passages == (
        Passage("", "The green lamp stands on it.", True),
        Passage("", "A mill.", False),
        Passage("", "A boat.", False),
    )
    assert article.passages == (Passage("", "An article."),)
    assert [s.reason for s in loaded.skipped] == [
        "task 'gov_report' is not question answering in English",
        "the context does not consist of numbered passages",
    ]


def test_normalised_form(load: Callable[..., LoadedRows]) -> None:
    loaded = load("musique", NORMALISED)
    (row,) = loaded.rows
    assert row.answers == ("North Pier", "the north one")
    assert row.passages == (
        Passage("Piers & lamps", "North Pier has one.", True),
        Passage("Unknown", "A lamp.", None),
    )
    assert [(s.part, s.reason) for s in loaded.skipped] == [("passage 1 'Empty'", "empty passage")]


def test_nothing_is_left_out_silently(load: Callable[..., LoadedRows]) -> None:
    bad: list[Any] = [
        "{not json",
        [1, 2],
        {"title": "?"},
        {**NORMALISED, "id": "a", "question": " "},
        {**NORMALISED, "id": "b", "answers": []},
        {**NORMALISED, "id": "c", "answers": "North Pier"},
        {**NORMALISED, "id": "d", "paragraphs": []},
        {**NORMALISED, "id": "e", "paragraphs": [{"title": "t"}]},
        {**HOTPOT, "_id": "f", "answer": None},
        {**HOTPOT, "_id": "g", "context": [["Pier", "not a list"]]},
        {**HOTPOT, "_id": "h", "context": {"title": ["a"], "sentences": []}},
        {**MUSIQUE, "id": 7, "paragraphs": ["text"]},
        NORMALISED,
    ]
    loaded = load("hotpotqa", NORMALISED, *bad)
    assert [row.id for row in loaded.rows] == ["n1"]
    rows = [entry for entry in loaded.skipped if entry.part == "row"]
    assert [entry.index for entry in rows] == list(range(1, len(bad) + 1))
    assert [(entry.id, entry.reason) for entry in rows] == [
        ("", "the line is not JSON"),
        ("", "the record is not an object"),
        ("", "the fields are those of no known format"),
        ("a", "no question"),
        ("b", "no answer"),
        ("c", "field 'answers' is not a list of texts"),
        ("d", "no passage with text"),
        ("e", "no field 'text'"),
        ("f", "no field 'answer'"),
        ("g", "a passage is not a list of sentences"),
        ("h", "field 'context' is not a list"),
        ("7", "a paragraph is not an object"),
        ("n1", "another row before it has the same id"),
    ]
    report = loaded.report()
    assert report.startswith("1 rows\n")
    assert "1 rows left out: no answer (first: record 5, b)" in report


def test_limit_counts_good_rows(load: Callable[..., LoadedRows]) -> None:
    records = [{**NORMALISED, "id": str(n), "answers": ["x"] if n else []} for n in range(5)]
    assert [row.id for row in load("hotpotqa", *records, limit=2).rows] == ["1", "2"]


def test_what_cannot_be_read_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        load_rows(tmp_path / "missing.json", "hotpotqa")
    (tmp_path / "text.json").write_text("hello", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read"):
        load_rows(tmp_path / "text.json", "hotpotqa")
    (tmp_path / "number.json").write_text("7", encoding="utf-8")
    with pytest.raises(DataError, match="neither a list"):
        load_rows(tmp_path / "number.json", "hotpotqa")
    with pytest.raises(DataError, match="'squad' is not known"):
        load_rows(tmp_path / "text.json", "squad")


def test_json_lines_need_no_such_name(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    lines = [json.dumps({**NORMALISED, "id": str(number)}) for number in range(3)]
    file.write_text("\n".join(lines), encoding="utf-8")
    assert len(load_rows(file, "hotpotqa").rows) == 3


def test_shared_data(shared_dir: Path) -> None:
    for dataset, count in (("hotpotqa", 110), ("2wikimqa", 59), ("triviaqa", 57), ("musique", 129)):
        loaded = load_rows(shared_dir / "data" / f"{dataset}.jsonl", dataset)
        assert len(loaded.rows) == count
        assert all(entry.part != "row" for entry in loaded.skipped)


class FakeHub(ModuleType):
    """Stands in for the package `datasets`."""

    def __init__(self, *records: Any) -> None:
        super().__init__("datasets")
        self.records = records
        self.calls: list[tuple[Any, ...]] = []

    def load_dataset(self, path: str, name: str | None, **options: Any) -> Any:
        self.calls.append((path, name, options))
        return iter(self.records)


def columns(records: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {key: [record[key] for record in records] for key in records[0]}


def test_hub_copies_have_lists_of_objects_as_objects_of_lists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hotpot = {
        **{key: HOTPOT[key] for key in ("question", "answer")},
        "id": "h1",
        "supporting_facts": {"title": ["North Pier"], "sent_id": [0]},
        "context": {
            "title": ["North Pier", "South Pier"],
            "sentences": [["The pier has a lamp."], ["It has none."]],
        },
    }
    hub = FakeHub(hotpot)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    (row,) = load_hub("hotpotqa", limit=5).rows
    assert row.facts == (SupportingFact("North Pier", "The pier has a lamp."),)
    assert [passage.is_gold for passage in row.passages] == [True, False]
    assert hub.calls == [
        (
            "hotpotqa/hotpot_qa",
            "distractor",
            {"split": "validation", "revision": None, "streaming": True},
        )
    ]


def test_hub_copy_of_triviaqa_holds_its_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    page = {"title": "Harrow", "wiki_context": "The Green Lamp.", "filename": "", "doc_source": ""}
    result = {"title": "Piers", "search_context": "No lamp here.", "rank": 0}
    record = {
        "question": "What stands on the pier?",
        "question_id": "tc_1",
        "entity_pages": columns([page]),
        "search_results": columns([result]),
        "answer": {
            "value": "Green Lamp",
            "aliases": ["Green Lamp"],
            "normalized_aliases": ["green lamp"],
        },
    }
    monkeypatch.setitem(sys.modules, "datasets", FakeHub(record))
    (row,) = load_hub("triviaqa").rows
    assert row.answers == ("Green Lamp",)
    assert row.passages == (
        Passage("Harrow", "The Green Lamp.", True),
        Passage("Piers", "No lamp here.", False),
    )


def test_hub_arguments_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(LONGBENCH)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert load_hub("longbench", config="hotpotqa").rows[0].dataset == "longbench/hotpotqa"
    load_hub("musique", repository="me/copy", split="train", revision="v2")
    assert hub.calls[1] == (
        "me/copy",
        None,
        {"split": "train", "revision": "v2", "streaming": True},
    )
    with pytest.raises(DataError, match="task as config"):
        load_hub("longbench")


def test_hub_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"patchkv-agents\[data\]"):
        load_hub("hotpotqa")
    hub = FakeHub()

    def fail(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route to host.")

    hub.load_dataset = fail  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(DataError, match="no route to host"):
        load_hub("hotpotqa")
