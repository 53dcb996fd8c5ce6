"""Small text tools: words, sentences, and whether a text mentions a name."""

from __future__ import annotations

import re
from collections.abc import Iterable

_WORD = re.compile(r"\w+")
_FUNCTION_WORDS = frozenset(
    "a an and any are as at be been by did do does for from had has have he her his how in is it "
    "its of on or she that the their them they this to under was were what when where which who "
    "whom whose why will with".split()
)
# A sentence ends at a stop, an exclamation or a question mark, with closing quotes or brackets,
# where a new one starts. Some data sets glue sentences together ("Shanley.The film").
_END = re.compile(r"""[.!?]["')\]]*(?:\s+(?=["'(\[]*[^\W_a-z])|(?<=[a-z]\.)(?=[A-Z][a-z]))""")
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Jr|Sr|vs|No|Lt|Col|Gen|Sgt|Capt|Prof|Rev|ca|Mt|Ft|Inc|Co)|\b\w)\.$"
)


def flat(text: str) -> str:
    """The words of a text in lower case, each between two spaces, without punctuation."""
    return f" {' '.join(_WORD.findall(text.casefold()))} "


def mentions(flat_text: str, names: Iterable[str]) -> bool:
    """Whether a text, as `flat` gives it, has one of the names as whole words."""
    flat_names = (flat(name) for name in names)
    return any(name in flat_text for name in flat_names if name.strip())


def one_line(text: str) -> str:
    """The text with every run of white space as one space."""
    return " ".join(text.split())


def sentences(text: str) -> list[str]:
    """Split a text into sentences; none is empty. Joined by spaces they are the text again.

    Initials and common abbreviations end none.
    """
    text = one_line(text)
    found = []
    start = 0
    for match in _END.finditer(text):
        piece = text[start : match.end()].strip()
        if not _ABBREVIATION.search(piece):
            found.append(piece)
            start = match.end()
    if rest := text[start:].strip():
        found.append(rest)
    return found


def cut(text: str, words: int) -> str:
    """The first words of a text, with an ellipsis where more follow."""
    every = text.split()
    return text if len(every) <= words else " ".join(every[:words]).rstrip(",;:(") + " ..."


def keywords(text: str) -> list[str]:
    """The words of a text that are not function words, as they stand there."""
    words = (word.strip("\"'(),;:?!.") for word in text.split())
    return [word for word in words if word and word.casefold() not in _FUNCTION_WORDS]
