"""What kind of thing an answer is, by its form and by what the question asks for.

Only rough, and silent where in doubt: it decides which answers may stand for one another.
"""

from __future__ import annotations

import re

from patchkv_evals.datasets import QARow
from patchkv_evals.text import flat

CLOSED = "closed"
PERSON = "person"

_CLOSED_ANSWERS = ("yes", "no", "noanswer")
_MONTH = r"(?:Jan|Febr?|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]*\.?"
DATE = re.compile(rf"(?:\d{{1,2}} {_MONTH}|{_MONTH} \d{{1,2}}),? \d{{4}}", re.IGNORECASE)
_YEAR = re.compile(r"1\d{3}|20\d{2}")
_NUMBER = re.compile(r"\d[\d,]*(\.\d+)?")
_DEMONYM = re.compile(r"\w+(ish|ese|[ie]an|ican)|German|French|Dutch|Greek|Czech|Swiss|Thai")

# Nouns behind "which" or "what", or in an answer itself ("Delaware River").
_NOUNS = {
    PERSON: "person actor actress singer director author writer president player musician composer "
    "poet king queen politician character father mother wife husband spouse man woman rapper",
    "city": "city town village municipality capital borough",
    "country": "country nation nationality",
    "region": "county state province region district territory",
    "water": "river lake ocean sea bay creek",
    "building": "stadium museum theatre theater station airport church arena castle hotel building",
    "school": "university college school institute academy",
    "company": "company studio label corporation airline records entertainment",
    "band": "band group orchestra",
    "team": "team club",
    "film": "film movie",
    "music": "song album single hymn",
    "book": "book novel poem",
    "show": "series show sitcom opera musical",
    "periodical": "magazine newspaper journal",
    "party": "party",
    "language": "language",
    "award": "award medal prize",
    "animal": "animal bird fish breed dog",
}
_KIND_OF_NOUN = {noun: kind for kind, nouns in _NOUNS.items() for noun in nouns.split()}
_WHICH = re.compile(r"\b(?:which|what)((?:\s+[\w'’-]+){1,4})")
_STUDIED = re.compile(r"\b(?:study|studied|work|works|worked|graduate|graduated|educated|attend)\b")
_RELATIVES = re.compile(
    r"\b(?:father|mother|grand\w+|child|son|daughter|spouse|wife|husband|married|brother|sister|"
    r"sibling|family|uncle|aunt|\w+-in-law|widow\w*|parents?)\b"
)


def answer_kind(answer: str, question: str) -> str:
    """The kind of an answer; empty where it cannot be told.

    Numbers are of one kind if they have equally many digits.
    """
    answer = answer.strip()
    if flat(answer).strip() in _CLOSED_ANSWERS:
        return CLOSED
    if _YEAR.fullmatch(answer):
        return "year"
    if DATE.fullmatch(answer):
        return "date"
    if number := _NUMBER.fullmatch(answer):
        digits = sum(character.isdigit() for character in answer)
        return f"{'fraction' if number[1] else 'number'} of {digits}"
    if not _is_name(answer):
        return ""
    own = [_KIND_OF_NOUN[word] for word in flat(answer).split() if word in _KIND_OF_NOUN]
    kind = own[-1] if own else _asked_for(question)
    if kind == "country" and _DEMONYM.fullmatch(answer):
        return "demonym"
    return kind


def is_person(row: QARow) -> bool:
    """Whether a row's answer is the name of a person."""
    return answer_kind(row.answers[0], row.question) == PERSON


def asks_for_relative(question: str) -> bool:
    """Whether a question is about families, whose members share a name."""
    return bool(_RELATIVES.search(question.lower()))


def _asked_for(question: str) -> str:
    lowered = question.lower()
    if re.match(r"who(?:m|se)?\b", lowered):
        return PERSON
    if re.match(r"where\b", lowered):
        return "school" if _STUDIED.search(lowered) else "city"
    if re.match(r"what is the place of\b", lowered):
        return "city"
    for match in _WHICH.finditer(lowered):
        for word in match[1].split():
            if word in _KIND_OF_NOUN:
                return _KIND_OF_NOUN[word]
    return PERSON if re.search(r"(?:,|\bby) who(?:m|se)?\b", lowered) else ""


def _is_name(answer: str) -> bool:
    """Whether most words begin with a capital, and no digit or bracket is in it."""
    words = answer.split()
    capitals = sum(word.lstrip("\"'")[:1].isupper() for word in words)
    plain = not any(character.isdigit() or character in "()[]" for character in answer)
    return bool(words) and plain and 2 * capitals >= len(words)
