"""The report's sections on benchmarks: each a table, as `patchkv bench` prints it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from patchkv_evals.errors import DataError
from patchkv_evals.report.blocks import Block, Section, Text, table
from patchkv_evals.report.numbers import short
from patchkv_evals.report.sources import Bench, provenance_line

if TYPE_CHECKING:
    from patchkv_evals.benchmarks.results import Column

_TITLES = {
    "resume": "Resume",
    "plan": "Planning",
    "restore": "Restoring rows",
    "store": "Saving and loading checkpoints",
}


def bench_section(bench: Bench, anchor: str) -> Section:
    """One benchmark: what it ran on, and its points.

    Raises:
        DataError: a point lacks a field, or has another kind of value in it.
    """
    title = _TITLES.get(bench.name, bench.name)
    if sweep := bench.config.get("sweep"):
        title = f"{title} by {str(sweep).replace('_', ' ')}"
    if model := bench.config.get("model"):
        title = f"{title}: {model}"
    origin = f"{bench.path.name}, {bench.document['created']}. {provenance_line(bench.document)}."
    blocks = _points(bench) if bench.points else [Text("The file holds no points.")]
    return Section(title, anchor, (Text(origin), *blocks))


def _points(bench: Bench) -> list[Block]:
    if bench.name not in _TITLES:  # of another version: its points as they are
        fields = list(dict.fromkeys(key for point in bench.points for key in point))
        rows = [[short(json.dumps(point.get(key))) for key in fields] for point in bench.points]
        return [table(fields, rows)]
    columns: Sequence[Column] = import_module(f"patchkv_evals.benchmarks.{bench.name}").COLUMNS
    try:
        rows = [[column.text(point) for column in columns] for point in bench.points]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{bench.path}: not a file that this version's 'patchkv bench' wrote "
            f"({type(error).__name__}: {short(str(error))}); run the benchmark again."
        ) from error
    return [table([column.header for column in columns], rows, strong=("patchkv",))]
