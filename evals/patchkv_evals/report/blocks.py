"""What a report page is made of. All text in it is plain; the page escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

FEW = 30
"""Below so many figures a note says that an interval is rough."""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph that must not be missed."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """Lines to type."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a table under a heading of their own, or without one (empty)."""

    rows: tuple[tuple[str, ...], ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table; its first `text_columns` columns hold words, the others figures.

    Attributes:
        strong: first cells of the rows to stress.
    """

    headers: tuple[str, ...]
    groups: tuple[Rows, ...]
    caption: str = ""
    text_columns: int = 1
    strong: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart as PNG.

    Attributes:
        name: of its file, without suffix.
        alt: what it shows, for those who cannot see it.
        caption: how to read it.
    """

    name: str
    alt: str
    caption: str
    png: bytes
    width: int


Block: TypeAlias = Text | Note | Command | Table | Picture


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page with a heading.

    Attributes:
        anchor: its address within the page.
    """

    title: str
    anchor: str
    blocks: tuple[Block, ...]
    sections: tuple[Section, ...] = ()


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str = "",
    text_columns: int = 1,
    strong: Sequence[str] = (),
) -> Table:
    """A table without groups."""
    return Table(
        tuple(headers),
        (Rows(tuple(tuple(row) for row in rows)),),
        caption,
        text_columns,
        frozenset(strong),
    )


def few(n: int, what: str) -> Note | None:
    """A note where n is small."""
    if n >= FEW:
        return None
    return Note(
        f"Only {n} {what}, fewer than {FEW}: intervals are rough, and a difference within them "
        "says nothing."
    )
