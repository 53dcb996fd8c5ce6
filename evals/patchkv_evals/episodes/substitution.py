"""Puts another name in place of an answer, consistently, so that the text tells another fact."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from patchkv_evals.datasets import QARow
from patchkv_evals.episodes.kinds import (
    CLOSED,
    DATE,
    PERSON,
    answer_kind,
    asks_for_relative,
    is_person,
)
from patchkv_evals.errors import EpisodeError
from patchkv_evals.text import flat, mentions

_NEAR_YEARS = 5
_FAR_YEARS = 60


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row's answer as something that may stand in another row's text."""

    row_id: str
    answers: tuple[str, ...]
    kind: str

    @classmethod
    def of(cls, row: QARow) -> Candidate | None:
        """The answer in the form in which the row's passages have it.

        None if they have not, if it is not clear what it is, or if it is written in capitals.
        """
        texts = [flat(f"{passage.title} {passage.text}") for passage in row.passages]
        surface = next((a for a in row.answers if any(mentions(text, [a]) for text in texts)), "")
        kind = answer_kind(surface, row.question)
        if kind in ("", CLOSED) or (len(surface) > 4 and surface.isupper()):
            return None
        others = (answer for answer in row.answers if answer != surface)
        return cls(row.id, (surface, *others), kind)


@dataclass(frozen=True, slots=True)
class Substitution:
    """Another answer in place of a row's.

    Attributes:
        old: the row's answers.
        new: the other answer, in the form that is written, and its aliases.
        surnames: the answer is a person, whom texts also call by the last part of the name.
    """

    old: tuple[str, ...]
    new: tuple[str, ...]
    surnames: bool

    def changed(self, text: str) -> str:
        """The text with every form of the old answer replaced, the longest first.

        Raises:
            EpisodeError: the text would not tell the new fact, or still the old one.
        """
        for pattern, new in self._rules():
            text = pattern.sub(partial(_replacement, new), text)
        self._check(text)
        return text

    def _check(self, text: str) -> None:
        flat_text = flat(text)
        if not mentions(flat_text, self.new[:1]):
            raise EpisodeError("the answer is not in the evidence in so many words")
        new_words = set(flat(self.new[0]).split())
        for name in forms(self.old, surnames=self.surnames):
            remains = mentions(flat_text, [name]) if len(name) > 4 else _whole(name).search(text)
            if remains and not set(flat(name).split()) <= new_words:
                raise EpisodeError("a form of the old answer cannot be replaced")
        stem = _stem(self.old[0])
        if stem and any(word.startswith(stem) for word in flat_text.split()):
            raise EpisodeError("a word derived from the old answer remains")

    def _rules(self) -> list[tuple[re.Pattern[str], str]]:
        new = self.new[0]
        rules = [(_whole(name), new) for name in sorted(self.old, key=len, reverse=True)]
        for name in self.old:
            words = name.split()
            if self.surnames and len(words) > 1:
                first, last = re.escape(words[0]), re.escape(words[-1])
                between = r"(?: [\"'(]*[A-Z]\S*){0,3}?"
                full = re.compile(rf"(?<!\w){first}{between} {last}(?!\w)")
                rules += [(full, new), (_whole(words[-1]), new.split()[-1])]
            if DATE.fullmatch(name):
                rules.append((_whole(name[-4:]), new[-4:]))
        return rules


def forms(answers: Iterable[str], *, surnames: bool) -> tuple[str, ...]:
    """Answers, with the last part of a person's name and the year of a date by themselves."""
    found = list(answers)
    for name in tuple(found):
        if surnames and len(name.split()) > 1:
            found.append(name.split()[-1])
        if DATE.fullmatch(name):
            found.append(name[-4:])
    return tuple(dict.fromkeys(found))


def uses_surname(row: QARow) -> bool:
    """Whether the row's passages may mean the answer by the last part of its name alone.

    Not where a question asks for relatives, who share it.
    """
    return is_person(row) and not asks_for_relative(row.question)


def choose(
    row: QARow, texts: str, candidates: Sequence[Candidate], rng: random.Random
) -> tuple[Substitution, str]:
    """Choose another row's answer of the same kind, and of about the same length.

    Args:
        row: whose answer is to be replaced.
        texts: evidence and other gold passages; no name in them is taken.
        candidates: of all rows.
        rng: chooses among those that suit equally.

    Returns:
        The substitution, and the id of the row that lent its answer.

    Raises:
        EpisodeError: the answer cannot be replaced, or none suits.
    """
    flat_question, flat_texts = flat(row.question), flat(texts)
    answer = next((a for a in row.answers if mentions(flat_texts, [a])), row.answers[0])
    kind = answer_kind(answer, row.question)
    if kind == CLOSED:
        raise EpisodeError("the answer is yes or no")
    if not kind:
        raise EpisodeError("it is not clear what kind of thing the answer is")
    if len(flat(answer).strip()) < 3:
        raise EpisodeError("the answer is too short to be found safely")
    if mentions(flat_question, row.answers):
        raise EpisodeError("the question names the answer")
    if uses_surname(row) and _has_namesakes(answer, texts):
        raise EpisodeError("somebody else in the evidence has the same surname")
    old_names = {flat(name) for name in row.answers}
    taken = {word for name in old_names for word in name.split() if len(word) > 3}
    fits = [
        candidate
        for candidate in candidates
        if candidate.row_id != row.id
        and candidate.kind == kind
        and taken.isdisjoint(flat(candidate.answers[0]).split())
        and old_names.isdisjoint(flat(name) for name in candidate.answers)
        and not mentions(flat_texts, candidate.answers)
        and not mentions(flat_question, candidate.answers)
    ]
    best = _closest(answer, kind, fits)
    if not best:
        raise EpisodeError("no other row has an answer of the same kind")
    chosen = rng.choice(best)
    return Substitution(row.answers, chosen.answers, uses_surname(row)), chosen.row_id


def _closest(answer: str, kind: str, fits: Sequence[Candidate]) -> list[Candidate]:
    """The candidates most like an answer: years near it, names of about as many words."""
    if kind == "year":
        distances = {c.row_id: abs(int(c.answers[0]) - int(answer)) for c in fits}
        near = sorted(fits, key=lambda c: distances[c.row_id])[:_NEAR_YEARS]
        return [c for c in near if distances[c.row_id] <= _FAR_YEARS]
    words = len(answer.split())
    lengths = {c.row_id: len(c.answers[0].split()) for c in fits}
    if kind == PERSON:  # who is called by one name is a god, an emperor or a whale
        fits = [c for c in fits if (lengths[c.row_id] > 1) == (words > 1)]
    return [c for c in fits if abs(lengths[c.row_id] - words) <= 1] or list(fits)


def _has_namesakes(name: str, texts: str) -> bool:
    """Whether the last part of a name follows a word that is no part of the name, as a name does.

    "Michael Edwards" beside "Eddie Edwards" may be a brother or the same man.
    """
    *own, last = name.split()
    before = re.findall(rf"([A-Z][\w.'’-]*)[ \"']+{re.escape(last)}(?!\w)", texts)
    return bool(own) and not set(before) <= {word.strip("\"'") for word in own}


def _whole(name: str) -> re.Pattern[str]:
    """The name as whole words; a short one with its capitals, since "US" is not "us"."""
    escaped = r"\s+".join(map(re.escape, name.split()))
    return re.compile(rf"(?<!\w){escaped}(?!\w)", re.IGNORECASE if len(name) > 4 else 0)


def _replacement(new: str, match: re.Match[str]) -> str:
    """The new name, in lower case where the old one stood in lower case."""
    return new.lower() if match[0] == match[0].lower() else new


def _stem(answer: str) -> str:
    """How words derived from a name start ("swed" of Sweden); empty for other answers."""
    if " " in answer or len(answer) < 5 or not answer[0].isupper():
        return ""
    return answer.casefold()[: max(4, len(answer) - 2)]
