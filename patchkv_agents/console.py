"""What all commands share when they print for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from patchkv_agents.errors import PatchKVError

if TYPE_CHECKING:
    from rich.console import Console

NARROW = 76
"""Columns below which a table would be cut: print lines instead."""


def new_console(*, stderr: bool = False) -> Console:
    """A console that shows text as it is: no highlighting, markup or emoji names in it.

    Colours follow the terminal, `NO_COLOR` and `FORCE_COLOR`.
    """
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True, stderr=stderr)


@contextmanager
def naming(place: Any) -> Iterator[None]:
    """Put the place (a file, a version) in front of the errors raised inside."""
    try:
        yield
    except PatchKVError as error:
        raise type(error)(f"{place}: {error}") from error


def plural(count: int, noun: str) -> str:
    """`1 message`, `2 messages`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def print_table(
    console: Console,
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    justify: Literal["left", "right"] = "right",
) -> None:
    """Print a table, or a line for each row where the terminal is too narrow for one.

    Args:
        console: where to.
        headers: of the columns.
        rows: their cells, printed as they are.
        justify: of all columns but the first, which is on the left.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if console.width < NARROW:
        for row in rows:
            cells = zip(headers, row, strict=True)
            console.print(", ".join(f"{header} {cell}".strip() for header, cell in cells if cell))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, header in enumerate(headers):
        table.add_column(header, justify=justify if index else "left", no_wrap=justify == "right")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table, soft_wrap=False)
