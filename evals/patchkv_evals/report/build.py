"""Builds the report: what is on the page, in which order, and the files it is written to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkv_agents import __version__
from patchkv_agents.console import plural
from patchkv_agents.provenance import created
from patchkv_evals.errors import ReportError
from patchkv_evals.report.benches import bench_section
from patchkv_evals.report.blocks import Block, Command, Section, Text
from patchkv_evals.report.charts import edit_chart, require_matplotlib, speed_chart
from patchkv_evals.report.page import pictures, render
from patchkv_evals.report.sources import (
    Bench,
    ModelRuns,
    Sources,
    provenance_line,
    read_sources,
)
from patchkv_evals.report.tables import edit_tables, failures, methods_table
from patchkv_evals.report.targets import headline, headlines, targets_blocks

TITLE = "PatchKV Agents: evaluation report"


@dataclass(frozen=True, slots=True)
class Written:
    """What was written, and what it says in numbers.

    Attributes:
        page: the HTML file.
        figures: the PNG files.
        models: for each model its pooled figures and targets; see `pooled.Pooled.to_dict`.
        headlines: for each model the comparison in a sentence.
    """

    page: Path
    figures: tuple[Path, ...]
    models: tuple[dict[str, Any], ...]
    headlines: tuple[str, ...]


def write_report(folders: Iterable[Path], out: Path) -> Written:
    """Write the page and, in a folder beside it, its figures as PNG files.

    Args:
        folders: of `patchkv eval --out` and `patchkv bench --out`, or folders of such folders.
        out: the HTML file; it is replaced, and so are figures of the same names in
            `<its stem>-figures`.

    Raises:
        DataError: a folder holds no results, or a file is damaged.
        ReportError: Matplotlib is missing, or nothing can be written there.
    """
    require_matplotlib()
    sources = read_sources(folders)
    sections = _sections(sources)
    page = render(TITLE, _head(sources), sections)
    beside = out.with_name(f"{out.stem}-figures")
    figures = []
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8", errors="backslashreplace")
        for picture in pictures(sections):
            beside.mkdir(exist_ok=True)
            figures.append(beside / f"{picture.name}.png")
            figures[-1].write_bytes(picture.png)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ReportError(f"{out} cannot be written ({reason}); choose another --out.") from error
    return Written(
        out,
        tuple(figures),
        models=tuple(model.pooled.to_dict() for model in sources.models),
        headlines=tuple(headline(model) for model in sources.models),
    )


def _head(sources: Sources) -> list[Block]:
    runs, benches = len(sources.runs), len(sources.benches)
    origins = dict.fromkeys(
        provenance_line(document)
        for document in (
            *(source.run.config for source in sources.runs),
            *(bench.document for bench in sources.benches),
        )
    )
    blocks: list[Block] = [
        Text(
            f"From {plural(runs, 'evaluation run')} and {plural(benches, 'benchmark')}; written "
            f"{created()} by patchkv-agents {__version__}."
        )
    ]
    blocks += [Text(f"Measured on: {origin}.") for origin in origins]
    return [*blocks, headlines(sources.models)] if sources.models else blocks


def _sections(sources: Sources) -> list[Section]:
    sections = [
        _model_section(model, f"model-{number}")
        for number, model in enumerate(sources.models, start=1)
    ]
    if sources.benches:
        parts = tuple(bench_section(bench, name) for bench, name in _named(sources.benches))
        sections.append(Section("Benchmarks", "benchmarks", (), parts))
    names = {record["method"] for model in sources.models for record in model.records}
    names |= {
        point["method"]
        for bench in sources.benches
        if bench.name == "resume"
        for point in bench.points
    }
    if names:
        sections.append(Section("Methods", "methods", (methods_table(names),)))
    if sources.runs:
        blocks = tuple(failures(sources.runs))
        sections.append(Section("Failures and skipped rows", "failures", blocks))
    sections.append(Section("How to reproduce", "reproduce", tuple(_commands(sources))))
    return sections


def _model_section(model: ModelRuns, anchor: str) -> Section:
    """Targets, charts and tables of one model."""
    records, title = model.records, model.title
    if not records:
        text = "No method gave a result: see the failures below."
        return Section(title, anchor, (Text(text),))
    config = model.runs[0].run.config
    datasets = dict.fromkeys(source.run.config["dataset"] for source in model.runs)
    edits = dict.fromkeys(record["edit"] for record in records)
    lengths = [record["tokens_new"] for record in records]
    profile = config.get("profile_sha256")
    head = (
        f"{plural(model.pooled.rows, 'row')} of {', '.join(datasets)}, edited by "
        f"{', '.join(edits)}; contexts of {min(lengths):,} to {max(lengths):,} tokens. Weights "
        f"{config['fingerprint']}."
        + (f" Methods from the profile with policies {profile[:16]}." if profile else "")
    )
    charts = (
        speed_chart(f"{anchor}-speed", title, records),
        edit_chart(f"{anchor}-edits", title, model.summary["edits"]),
    )
    parts = (
        Section("Targets", f"{anchor}-targets", tuple(targets_blocks(model))),
        Section("Quality against time", f"{anchor}-quality", charts),
        Section("By kind of edit", f"{anchor}-tables", tuple(edit_tables(model))),
    )
    return Section(title, anchor, (Text(head),), tuple(part for part in parts if part.blocks))


def _named(benches: Sequence[Bench]) -> list[tuple[Bench, str]]:
    """Each benchmark with a name for its figure: from its file's name, and a number if need be."""
    stems = [_plain(bench.path.stem) for bench in benches]
    return [
        (bench, stem if stems.count(stem) == 1 else f"{stem}-{stems[: place + 1].count(stem)}")
        for place, (bench, stem) in enumerate(zip(benches, stems, strict=True))
    ]


def _plain(stem: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem)


def _commands(sources: Sources) -> list[Block]:
    commands = dict.fromkeys(
        (
            *(source.run.config["command"] for source in sources.runs),
            *(bench.document["command"] for bench in sources.benches),
        )
    )
    data = dict.fromkeys(
        f"{source.run.config['data']}: SHA-256 {source.run.config['data_sha256']}"
        for source in sources.runs
        if source.run.config.get("data_sha256")
    )
    blocks: list[Block] = [
        Text("These commands made the results, on the machines named above:"),
        Command(tuple(commands)),
    ]
    if data:
        blocks += [Text("With the data:"), Command(tuple(data))]
    return blocks
