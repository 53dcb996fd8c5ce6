"""Compares two texts: common ends, common words, the piece that one lost."""

from __future__ import annotations

import unicodedata
from collections import Counter
from functools import cached_property

# In texts longer than this, lines are compared instead of words.
_LONG = 100_000
# A remnant this short can be a part of another text by chance.
_SHORTEST_REMNANT = 16
LONGEST_MARKER = 64
"""What is put in the place of a text that was cut short has so many characters at most."""


def common_prefix(a: str, b: str) -> int:
    """Length of the common beginning."""
    size = min(len(a), len(b))
    at, piece = 0, 64
    while at < size and a[at : at + piece] == b[at : at + piece]:
        at, piece = at + piece, piece * 2
    low, high = min(at, size), min(at + piece, size)  # the first difference is in between, or none
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def common_suffix(a: str, b: str) -> int:
    """Length of the common end."""
    return common_prefix(a[::-1], b[::-1])


def common_ends(a: str, b: str) -> tuple[int, int]:
    """Length of the common beginning, and of the common end of what is left."""
    prefix = common_prefix(a, b)
    return prefix, common_suffix(a[prefix:], b[prefix:])


class TextProfile:
    """A text that is compared with several others."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def _words(self) -> Counter[str]:
        pieces = self.text.split() if len(self.text) <= _LONG else _lines(self.text)
        return Counter(pieces)

    @cached_property
    def _count(self) -> int:
        return self._words.total()

    def similarity(self, other: TextProfile) -> float:
        """Share of text in common, from 0 to 1. Linear in the length.

        The larger of two shares: common beginning and end, and common words in any order. At
        least a half if one text is the other one cut short.
        """
        if self.text == other.text:
            return 1.0
        shortest, longest = sorted((len(self.text), len(other.text)))
        kept = sum(common_ends(self.text, other.text))
        ends = kept / longest
        if kept >= _SHORTEST_REMNANT and shortest - kept <= min(kept, LONGEST_MARKER):
            ends = max(ends, 0.5)
        if longest > _LONG and ends >= 0.5:
            return ends
        total = self._count + other._count
        few, many = sorted((self._words, other._words), key=len)
        words = 2 * (few & many).total() / total if total else 0.0
        return max(ends, words)


def text_similarity(a: str, b: str) -> float:
    """Share of text which two texts have in common (`TextProfile.similarity`)."""
    return TextProfile(a).similarity(TextProfile(b))


def _lines(text: str) -> list[str]:
    """Pieces of a long text: lines, or what commas divide if it has hardly any."""
    lines = text.splitlines()
    return lines if len(lines) * _LONG > len(text) * 100 else text.split(",")


def same_words(a: str, b: str) -> bool:
    """Whether two texts differ in nothing but white space and Unicode form (NFC or NFD)."""
    prefix, suffix = common_ends(a, b)
    # Whole words: what comes before and behind is equal on both sides anyway.
    while prefix and not a[prefix - 1].isspace():
        prefix -= 1
    while suffix and not a[-suffix].isspace():
        suffix -= 1
    middles = [text[prefix : len(text) - suffix] for text in (a, b)]
    first_words = [_words(" ".join(middle.split(None, 1)[:1])) for middle in middles]
    if first_words[0] != first_words[1]:  # as in most texts that differ, however long they are
        return False
    return _words(middles[0]) == _words(middles[1])


def _words(text: str) -> list[str]:
    return unicodedata.normalize("NFC", text).split()


def is_cut(longer: str, shorter: str) -> bool:
    """Whether `shorter` is `longer` without one piece of it.

    Of a few characters that are left nothing can be said, unless whole lines went.
    """
    if not 0 < len(shorter) < len(longer):
        return False
    prefix, suffix = common_ends(longer, shorter)
    if prefix + suffix < len(shorter):
        return False
    gone = longer[prefix : len(longer) - suffix]
    whole_lines = gone.startswith("\n") or gone.endswith("\n")
    return whole_lines or len(shorter) >= _SHORTEST_REMNANT


def lost_piece(longer: str, shorter: str) -> str | None:
    """The one piece that `shorter` lacks, without white space around it; None if there is none."""
    start, suffix = common_ends(longer, shorter)
    stop = len(longer) - suffix
    if start + suffix < len(shorter):
        return None
    # Where the text around the piece repeats itself, the piece that begins a line is meant.
    first, last = start, stop
    while first and longer[first - 1] != "\n" and longer[first - 1] == longer[last - 1]:
        first, last = first - 1, last - 1
    if first == 0 or longer[first - 1] == "\n":
        start, stop = first, last
    piece = longer[start:stop].strip()
    return piece if len(piece) >= _SHORTEST_REMNANT else None
