"""Finds where each piece of content is in a rendered context.

The template is run once more with a pair of marker characters around each piece. If the result
without the markers is the same text as before, then the markers' places are exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from patchkv_agents.context.texts import common_prefix, common_suffix

# Characters for private use have no meaning, white space, case or escapes.
_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE), range(0xE000, 0xF900))
_IS_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010ffff]")
# Templates look for tags at the ends of content, so markers go behind the first, before the last.
_FIRST_TAG = re.compile(r"<[^<>\s]{1,40}>")
_LAST_TAG = re.compile(r"<[^<>\s]{1,40}>\Z")


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of content in the rendered text, without the white space around it.

    Attributes:
        message: index of the message; -1 for tools.
        field: where in the message, e.g. `content` or `tool_calls[0].arguments.path`.
        start: first character.
        stop: the character behind the last one.
    """

    message: int
    field: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Mark:
    message: int
    field: str
    core: str
    lead: int  # characters of the core in front of the opening marker
    trail: int  # characters of the core behind the closing marker


def private_characters(text: str) -> set[str]:
    """The characters in `text` which cannot be used as markers."""
    return set(_IS_PRIVATE.findall(text))


class Marker:
    """Marks texts on their way into a template, and reads the marks in what comes out.

    Args:
        taken: characters which cannot be used as markers.
        wants: decides by (message index, field, text) whether to mark a text.
    """

    def __init__(self, taken: Iterable[str], wants: Callable[[int, str, str], bool]) -> None:
        used = set(taken)
        characters = (chr(code) for block in _PRIVATE_USE for code in block)
        self._free = (character for character in characters if character not in used)
        self._wants = wants
        self.complete = True  # False once there were no characters left to mark with
        self._marks: dict[str, _Mark] = {}  # by opening marker
        self._opening: dict[str, str] = {}  # by closing marker

    def __call__(self, message: int, field: str, text: str) -> str:
        """The text with markers around what is not white space, if it is wanted."""
        if not self._wants(message, field, text):
            return text
        opening, closing = next(self._free, ""), next(self._free, "")
        if not closing:
            self.complete = False  # more than 60,000 pieces
            return text
        body = text.rstrip()
        start = len(body) - len(body.lstrip())
        core = body[start:]
        first = _FIRST_TAG.match(core)
        lead = first.end() if first else 0
        last = _LAST_TAG.search(core, lead)
        trail = len(core) - last.start() if last else 0
        self._marks[opening] = _Mark(message, field, core, lead, trail)
        self._opening[closing] = opening
        start, stop = start + lead, len(body) - trail
        return text[:start] + opening + text[start:stop] + closing + text[stop:]

    def read(self, marked: str) -> tuple[str, list[Piece]]:
        """The text without markers, and the pieces in it, in their order there."""
        found: list[tuple[str, int]] = []  # marker, its place in the text without markers
        plain = []
        done = 0
        for match in _IS_PRIVATE.finditer(marked):
            character = match.group()
            if character not in self._marks and character not in self._opening:
                continue
            plain.append(marked[done : match.start()])
            found.append((character, match.start() - len(found)))
            done = match.end()
        text = "".join((*plain, marked[done:]))
        return text, sorted(self._pieces(text, found), key=lambda piece: (piece.start, piece.stop))

    def omitted(self, pieces: Iterable[Piece]) -> tuple[tuple[int, str], ...]:
        """Message index and field of each marked text that is in none of the pieces."""
        shown = {(piece.message, piece.field) for piece in pieces}
        marks = ((mark.message, mark.field) for mark in self._marks.values() if mark.core)
        return tuple(key for key in marks if key not in shown)

    def _pieces(self, text: str, found: list[tuple[str, int]]) -> Iterator[Piece]:
        open_at: dict[str, int] = {}
        for character, place in found:
            if character in self._marks:
                if character in open_at:
                    yield self._cut_behind(text, character, open_at[character])
                open_at[character] = place
                continue
            opening = self._opening[character]
            mark = self._marks[opening]
            if opening in open_at:
                start = open_at.pop(opening)
                lead = mark.core[: mark.lead]
                start -= mark.lead if text.endswith(lead, 0, start) else 0
            else:  # the template cut the beginning off
                inner = mark.core[mark.lead : len(mark.core) - mark.trail]
                start = place - common_suffix(inner, text[max(0, place - len(inner)) : place])
                start += len(text[start:place]) - len(text[start:place].lstrip())
            trail = mark.core[len(mark.core) - mark.trail :]
            stop = place + (mark.trail if text.startswith(trail, place) else 0)
            yield Piece(mark.message, mark.field, start, stop)
        for opening, place in open_at.items():
            yield self._cut_behind(text, opening, place)

    def _cut_behind(self, text: str, opening: str, place: int) -> Piece:
        """A piece whose end the template cut off."""
        mark = self._marks[opening]
        inner = mark.core[mark.lead :]
        stop = place + common_prefix(inner, text[place : place + len(inner)])
        return Piece(mark.message, mark.field, place, stop)
