"""Shared parts of `patchkv bench`: list options, progress, tables, files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from patchkv_agents.console import new_console, print_table
from patchkv_agents.errors import InputError

if TYPE_CHECKING:
    from patchkv_evals.benchmarks.results import BenchResult, Column

Value = TypeVar("Value")


def values_of(text: str, kind: Callable[[str], Value], option: str) -> tuple[Value, ...]:
    """The values of a list with commas.

    Raises:
        InputError: one of them is not of this kind, or there is none.
    """
    try:
        values = tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise InputError(f"{option} takes values with commas between them, not '{text}'") from error
    if not values:
        raise InputError(f"{option} needs at least one value")
    return values


def counts_of(text: str, option: str) -> tuple[int, ...]:
    """The whole numbers of a list with commas, each at least 1.

    Raises:
        InputError: there is another value in it, or none.
    """
    counts = values_of(text, int, option)
    if min(counts) < 1:
        raise InputError(f"{option} takes numbers from 1, not '{text}'")
    return counts


def show_step(step: str) -> None:
    """Show progress on standard error."""
    typer.echo(step, err=True)


def show(
    result: BenchResult,
    columns: Sequence[Column],
    *,
    as_json: bool,
    out: Path | None,
) -> None:
    """Print a result, and write its file if a folder is given.

    Args:
        result: of the benchmark.
        columns: of the table of its points.
        as_json: print the document instead.
        out: the folder.
    """
    file = None if out is None else result.write(out)
    if as_json:
        typer.echo(json.dumps(result.document()))
        return
    console = new_console()
    headers = [column.header for column in columns]
    rows = [[column.text(point) for column in columns] for point in result.points]
    print_table(console, headers, rows)
    from patchkv_agents.provenance import versions
    from patchkv_evals.provenance import machine

    place, used = machine(result.device), versions()
    console.print(
        f"{place['cpu']}, {place['threads']} threads, {place['device']}; torch {used['torch']}; "
        "times are medians [smallest, largest]"
    )
    if file is not None:
        console.print(f"written to {file}")
