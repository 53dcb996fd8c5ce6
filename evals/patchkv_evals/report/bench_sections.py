"""The parts of the page that show benchmarks: one section for each file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeAlias

from patchkv_evals.errors import DataError
from patchkv_evals.report.bench_analyses import selection_blocks, sensitivity_blocks
from patchkv_evals.report.bench_costs import (
    align_blocks,
    attention_blocks,
    packing_blocks,
    plan_blocks,
)
from patchkv_evals.report.bench_drift import drift_blocks
from patchkv_evals.report.bench_resume import resume_blocks
from patchkv_evals.report.bench_storage import formats_blocks, restore_blocks, store_blocks
from patchkv_evals.report.blocks import Block, Section, Text, table
from patchkv_evals.report.numbers import short
from patchkv_evals.report.sources import Bench, provenance_line

Make: TypeAlias = Callable[[Bench, str], list[Block]]
"""Makes the blocks of a benchmark; the second argument names its figure."""

_KINDS: dict[str, tuple[str, Make]] = {
    "resume": ("Resuming", resume_blocks),
    "restore": ("Payload and restore time by format", restore_blocks),
    "formats": ("Storage formats: bytes and divergence", formats_blocks),
    "drift": ("Drift against distance", drift_blocks),
    "selection": ("What more blocks bring, by the rule that chooses them", selection_blocks),
    "sensitivity": ("Blocks whose precision matters", sensitivity_blocks),
    "plan": ("Planning", plan_blocks),
    "align": ("Alignment", align_blocks),
    "attention": ("Overhead of attention scores", attention_blocks),
    "packing": ("Rows of several threads in one call", packing_blocks),
    "store": ("Saving and loading checkpoints", store_blocks),
}


def bench_order(bench: Bench) -> tuple[int, str, str]:
    """Sorts benchmarks as the page shows them: by kind, sweep, and file."""
    kinds = list(_KINDS)
    place = kinds.index(bench.name) if bench.name in _KINDS else len(kinds)
    # The published sweep comes first.
    sweep = str(bench.config.get("sweep", ""))
    return place, "" if sweep == "length" else sweep, str(bench.path)


def bench_section(bench: Bench, name: str) -> Section:
    """One benchmark: what it ran on, its figure and its table.

    Raises:
        DataError: a point lacks a field, or has another kind of value in it.
    """
    title, make = _KINDS.get(bench.name, (bench.name, _any_blocks))
    try:
        if bench.name == "resume":
            title = f"{title} by {bench.config['sweep'].replace('_', ' ')}"
        model = bench.config.get("model")
        heading = f"{title}: {model}" if model else title
        origin = (
            f"{bench.path.name}, {bench.document['created']}. {provenance_line(bench.document)}."
        )
        blocks = make(bench, name) if bench.points else [Text("The file holds no points.")]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(
            f"{bench.path}: not a file that this version's 'patchkv bench' wrote "
            f"({type(error).__name__}: {short(str(error))}); run the benchmark again."
        ) from error
    return Section(heading, name, (Text(origin), *blocks))


def _any_blocks(bench: Bench, name: str) -> list[Block]:
    """A benchmark of a kind that this page does not know: its points as they are."""
    fields = list(dict.fromkeys(key for point in bench.points for key in point))
    rows = [[short(json.dumps(point.get(key))) for key in fields] for point in bench.points]
    return [table(fields, rows)]
