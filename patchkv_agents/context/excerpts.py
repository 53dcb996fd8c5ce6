"""Excerpts of texts for one line of a report, and the place where two texts differ."""

from __future__ import annotations

from patchkv_agents.context.texts import common_ends

_LOOKED_AT = 8  # times the wanted length: white space is folded, the rest need not be read


def one_line(text: str, limit: int) -> str:
    """The start of a text on one line, without control characters; at most `limit` characters."""
    words = " ".join(text[: _LOOKED_AT * limit].split())
    line = "".join(c for c in words if c.isprintable())
    whole = len(text) <= _LOOKED_AT * limit and len(line) <= limit
    return line if whole else line[: limit - 3] + "..."


def quoted(text: str, limit: int = 60) -> str:
    """The start of a text in quotation marks, or in words that there is none."""
    if line := one_line(text, limit):
        return f"'{line}'"
    return "white space" if text else "nothing"


def escaped(text: str) -> str:
    """The text on one line, with line breaks and control characters as Python writes them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def changed_span(old: str, new: str) -> tuple[int, int, int]:
    """Where two texts differ, from the first to the last difference, in whole words.

    Returns:
        start, old_stop, new_stop: `old[start:old_stop]` became `new[start:new_stop]`.
    """
    start, end = common_ends(old, new)
    while start and not old[start - 1].isspace():
        start -= 1
    end = min(end, len(old) - start, len(new) - start)
    while end and not old[len(old) - end].isspace():
        end -= 1
    return start, len(old) - end, len(new) - end
