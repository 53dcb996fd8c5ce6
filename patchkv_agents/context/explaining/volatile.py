"""Volatile text, which programs generate at each call: times, dates, counters, ids."""

from __future__ import annotations

import re
from dataclasses import dataclass

from patchkv_agents.context.excerpts import changed_span

_MONTH_OR_DAY = (
    r"\b(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?"
    r"|Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?"
    r"|Mon(?:day)?|Tue(?:s(?:day)?)?|Wed(?:nesday)?|Thu(?:rs(?:day)?)?|Fri(?:day)?"
    r"|Sat(?:urday)?|Sun(?:day)?)\b"
)
_VOLATILE = re.compile(
    # A date, with a time behind it or without; a time.
    r"(?P<time>\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"
    r"|\b\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?"
    r"|\b\d{1,4}[./]\d{1,2}[./]\d{2,4}\b"
    rf"|{_MONTH_OR_DAY}|\b[AP]M\b)"
    # A UUID; a word of letters and digits.
    r"|(?P<id>\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b"
    r"|\b(?=\w*\d)(?=\w*[A-Za-z])\w{8,}\b)"
    r"|(?P<number>\d+(?:[.,]\d+)*(?:st|nd|rd|th)?)"
)
_NEAR = 12  # characters: a number this close to the name of a month belongs to a date
_LONGEST = 20_000  # characters between the first and the last difference


@dataclass(frozen=True, slots=True)
class VolatileChange:
    """Texts that differ in nothing but volatile words. `old` and `new` are the first such pair.

    `what` says what they are: `a time or date`, `an id`, `a number`.
    """

    what: str
    old: str
    new: str


def volatile_change(old: str, new: str) -> VolatileChange | None:
    """The difference of two texts that differ only in times, dates, numbers and ids; else None."""
    start, old_stop, new_stop = changed_span(old, new)
    before, after = old[start:old_stop], new[start:new_stop]
    if before == after or max(len(before), len(after)) > _LONGEST:
        return None
    if skeleton(before) != skeleton(after):
        return None
    # Equal skeletons hold equally many volatile words, and the text between them is equal.
    pairs = zip(_VOLATILE.finditer(before), _VOLATILE.finditer(after), strict=True)
    a, b = next((a, b) for a, b in pairs if a.group() != b.group())
    kinds = {a.lastgroup, b.lastgroup}
    near = old[max(0, start + a.start() - _NEAR) : start + a.end() + _NEAR]
    if "time" in kinds or re.search(_MONTH_OR_DAY, near):
        what = "a time or date"
    else:
        what = "an id" if "id" in kinds else "a number"
    return VolatileChange(what, a.group(), b.group())


def skeleton(text: str) -> str:
    """The text with each volatile word replaced by the same character."""
    return _VOLATILE.sub("\0", text)
