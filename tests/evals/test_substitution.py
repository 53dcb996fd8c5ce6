from __future__ import annotations

import random

import pytest

from patchkv_evals.datasets import Passage, QARow
from patchkv_evals.episodes.kinds import answer_kind, is_person
from patchkv_evals.episodes.substitution import Candidate, Substitution, choose, uses_surname
from patchkv_evals.errors import EpisodeError


def row(question: str, answer: str, text: str, id: str = "a") -> QARow:
    return QARow(id, "hotpotqa", question, (answer,), (Passage("Title", text, True),))


@pytest.mark.parametrize(
    ("answer", "question", "kind"),
    [
        ("Yes", "Is it?", "closed"),
        ("1993", "When was it?", "year"),
        ("May 19, 1669", "When did he die?", "date"),
        ("10 August 1960", "When was she born?", "date"),
        ("2,913,123", "How many live there?", "number of 7"),
        ("5.1", "What percentage?", "fraction of 2"),
        ("Gisela Elsner", "Who is the mother of the director?", "person"),
        ("Lana Wood", "Which actress played the part?", "person"),
        ("Dayton, Ohio", "Where was the wife of Lou Breslow born?", "city"),
        ("Yale College", "Where did his father study?", "school"),
        ("UCLA", "Where did his father study?", "school"),
        ("Sweden", "Which country is he from?", "country"),
        ("Chinese", "What nationality is the composer?", "demonym"),
        ("Wooden Crosses", "Which film came first?", "film"),
        ("Delaware River", "What is the mouth of the watercourse?", "water"),
        ("Hull", "In which city's harbour, or what town, is it?", "city"),
        ("Bass Communion", "Under what name did he record?", ""),
        ("ease of use", "What was improved?", ""),
        ("Octopussy (film)", "Which film is it?", ""),
    ],
)
def test_kinds(answer: str, question: str, kind: str) -> None:
    assert answer_kind(answer, question) == kind


def test_a_person_is_replaced_under_all_names() -> None:
    given = Substitution(("Cole Porter",), ("Ines Varga",), surnames=True)
    text = (
        "Cole Porter (or Cole A. Porter) wrote it. PORTER's songs, by C. Porter; a reporter came."
    )
    assert given.changed(text) == (
        "Ines Varga (or Ines Varga) wrote it. Varga's songs, by C. Varga; a reporter came."
    )


def test_relatives_keep_their_names() -> None:
    """A family shares its name: "the son of Francis Bacon" is not about the answer."""
    asked = row("Who is the father of Francis Bacon?", "Nicholas Bacon", "x")
    assert is_person(asked)
    assert not uses_surname(asked)
    given = Substitution(asked.answers, ("Ines Varga",), surnames=uses_surname(asked))
    assert (
        given.changed("Francis Bacon, son of Nicholas Bacon") == "Francis Bacon, son of Ines Varga"
    )


def test_the_year_of_a_date_goes_with_it() -> None:
    given = Substitution(("May 19, 1669",), ("8 August 1645",), surnames=False)
    assert given.changed("He died on May 19, 1669. 1669 was cold.") == (
        "He died on 8 August 1645. 1645 was cold."
    )


def test_short_answers_keep_their_case_and_lower_case_text_stays_so() -> None:
    given = Substitution(("US", "United States"), ("Norway",), surnames=False)
    assert given.changed("the united states let us in; so did the US") == (
        "the norway let us in; so did the Norway"
    )


def test_backslashes_are_no_group_references() -> None:
    given = Substitution(("Nuts",), (r"A\1 Road",), surnames=False)
    assert given.changed("(Nuts)") == r"(A\1 Road)"


@pytest.mark.parametrize(
    ("old", "text", "reason"),
    [
        (("Sweden",), "A Swedish film from Sweden.", "derived"),
        (("Rome",), "Nothing of it here.", "not in the evidence"),
        (("Old-Pier",), "The Old-Pier, or old pier.", "cannot be replaced"),
    ],
)
def test_a_text_that_still_tells_the_old_fact_is_refused(
    old: tuple[str, ...], text: str, reason: str
) -> None:
    with pytest.raises(EpisodeError, match=reason):
        Substitution(old, ("Norway",), surnames=False).changed(text)


def chosen(asked: QARow, *others: QARow) -> str:
    candidates = [found for other in others if (found := Candidate.of(other)) is not None]
    given, lender = choose(asked, asked.passages[0].text, candidates, random.Random(0))
    assert lender in {other.id for other in others}
    return given.new[0]


def test_the_substitute_is_of_the_same_kind() -> None:
    asked = row("Where was she born?", "Hull", "She was born in Hull.")
    town = row("In which town is it?", "Brisca", "It is in Brisca.", "b")
    singer = row("Who sang it?", "Rovere", "Rovere sang it.", "c")
    assert chosen(asked, singer, town) == "Brisca"
    with pytest.raises(EpisodeError, match="no other row"):
        chosen(asked, singer)


def test_the_substitute_is_new_to_the_evidence() -> None:
    asked = row("Where was she born?", "Hull", "Born in Hull, she lived in Brisca.")
    other = row("In which town is it?", "Brisca", "It is in Brisca.", "b")
    with pytest.raises(EpisodeError, match="no other row"):
        chosen(asked, other)


def test_years_are_near() -> None:
    asked = row("In which year was it?", "1920", "It was in 1920.")
    years = (1700, 1890, 1925, 1999)
    others = [row("In which year?", str(y), f"In {y}.", str(y)) for y in years]
    assert chosen(asked, *others) in ("1890", "1925")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (row("Is it?", "yes", "It is."), "yes or no"),
        (row("Which film is older, Fog or Rain?", "Fog", "Fog is older."), "names the answer"),
        (row("What is it like?", "green", "It is green."), "not clear"),
        (row("Which city?", "Y", "It is Y."), "too short"),
        (
            row("Who jumped?", "Eddie Edwards", "Michael Edwards, or Eddie Edwards, jumped."),
            "same surname",
        ),
    ],
)
def test_rows_that_cannot_be_flipped_say_why(asked: QARow, reason: str) -> None:
    with pytest.raises(EpisodeError, match=reason):
        chosen(asked, row("Where is it?", "Brisca", "In Brisca.", "b"))


def test_candidates_have_a_form_that_fits_a_text() -> None:
    loud = row("Which show is it?", "DESERT ISLAND DISCS", "DESERT ISLAND DISCS is on.", "b")
    absent = row("Which show is it?", "Fog", "Another one.", "c")
    assert Candidate.of(loud) is None
    assert Candidate.of(absent) is None
    aliased = QARow(
        "d", "triviaqa", "Which city?", ("Lincoln (city)", "Lincoln"), (Passage("", "Lincoln."),)
    )
    found = Candidate.of(aliased)
    assert found is not None
    assert found.kind == "city" or found.answers[0] == "Lincoln"
