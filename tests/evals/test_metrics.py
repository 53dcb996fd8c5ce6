"""Scores, computed by hand from the rules of the official scripts."""

from __future__ import annotations

import math

import pytest

from patchkv_evals.metrics import (
    answer_margin,
    answer_margin_recovery,
    normalize_answer,
    normalize_triviaqa,
    same_answer,
    scorer,
    stale_answer,
)


@pytest.mark.parametrize(
    ("text", "squad", "triviaqa"),
    [
        ("The Cat's  hat!", "cats hat", "cat s hat"),
        ("an A-team, a plan", "ateam plan", "team plan"),
        ("U.S.", "us", "u s"),
        ("New_York", "newyork", "new york"),
        ("‘Rock’ `n´ roll", "‘rock’ n´ roll", "rock n roll"),
        ("Theatre", "theatre", "theatre"),
        ("The", "", ""),
    ],
)
def test_normalisation(text: str, squad: str, triviaqa: str) -> None:
    assert normalize_answer(text) == squad
    assert normalize_triviaqa(text) == triviaqa


@pytest.mark.parametrize(
    ("dataset", "prediction", "answers", "f1", "em"),
    [
        # One of three words is right, of two wanted: P 1/3, R 1/2.
        ("hotpotqa", "the old Paris road", ["Paris, France"], 2 * (1 / 3) * (1 / 2) / (5 / 6), 0),
        ("hotpotqa", "Paris.", ["paris"], 1, 1),
        ("hotpotqa", "paris paris", ["paris"], 2 / 3, 0),
        # Yes and no get no credit for a word in common, on either side.
        ("hotpotqa", "yes it is", ["yes"], 0, 0),
        ("hotpotqa", "no", ["no man's land"], 0, 0),
        ("hotpotqa", "Yes!", ["yes"], 1, 1),
        ("2wikimqa", "no, it is not", ["no"], 0, 0),
        # SQuAD's rule, which MuSiQue and LongBench follow, has no such exception.
        ("musique", "yes it is", ["yes"], 0.5, 0),
        ("longbench/hotpotqa", "yes it is", ["yes"], 0.5, 0),
        # Nothing is left of either: MuSiQue's script counts that as equal, HotpotQA's F1 does not.
        ("musique", "a", ["The"], 1, 1),
        ("hotpotqa", "a", ["The"], 0, 1),
        ("musique", "", ["Rome"], 0, 0),
        # The best of the aliases counts.
        ("triviaqa", "Sunset Blvd", ["Sunset Boulevard", "sunset blvd"], 1, 1),
        ("triviaqa", "on Sunset Boulevard", ["Sunset Blvd", "Sunset Boulevard"], 0.8, 0),
        ("triviaqa", "rock-and-roll", ["rock and roll"], 1, 1),
        ("hotpotqa", "rock-and-roll", ["rock and roll"], 0, 0),
    ],
)
def test_f1_and_exact_match(
    dataset: str, prediction: str, answers: list[str], f1: float, em: float
) -> None:
    score = scorer(dataset)
    assert score.f1(prediction, answers) == pytest.approx(f1)
    assert score.em(prediction, answers) == em


def test_same_answer() -> None:
    assert same_answer("The Kestrel.", "kestrel")
    assert not same_answer("Kestrel ferry", "kestrel")
    assert same_answer("rock-and-roll", "rock and roll", scorer("triviaqa"))


@pytest.mark.parametrize(
    ("prediction", "stale"),
    [
        ("It leaves from the Old Pier.", True),
        ("the new pier", False),
        ("not the old pier but the new pier", False),
        ("gold piers", False),
        ("", False),
    ],
)
def test_stale_answer(prediction: str, stale: bool) -> None:
    assert stale_answer(prediction, ["Old Pier"], ["New Pier", "Pier Two"]) is stale


def test_stale_answer_that_is_part_of_the_new_one() -> None:
    assert not stale_answer("New York City", ["York"], ["New York"])
    assert stale_answer("York", ["York"], ["New York"])


def test_margin() -> None:
    new = [math.log(0.5), math.log(0.25)]
    old = [math.log(0.0625)]
    assert answer_margin(new, old) == pytest.approx(math.log(2))


def test_margin_recovery() -> None:
    assert answer_margin_recovery(2.0, full_prefill=3.0, before_edit=-1.0) == pytest.approx(0.75)
    assert answer_margin_recovery(-1.0, full_prefill=3.0, before_edit=-1.0) == 0.0
    # A smaller margin is recovered as well as a greater one.
    assert answer_margin_recovery(1.0, full_prefill=0.0, before_edit=4.0) == pytest.approx(0.75)
    assert answer_margin_recovery(1.0, full_prefill=1.05, before_edit=1.0) is None
