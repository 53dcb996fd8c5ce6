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
from patchkv_evals.report.bench_sections import bench_order, bench_section
from patchkv_evals.report.blocks import Block, Command, Section, Text
from patchkv_evals.report.eval_sections import model_section
from patchkv_evals.report.eval_tables import failures, methods_table
from patchkv_evals.report.page import pictures, render
from patchkv_evals.report.sources import Bench, Sources, provenance_line, read_sources
from patchkv_evals.report.style import require_matplotlib
from patchkv_evals.report.targets import headline, headlines

TITLE = "PatchKV Agents: evaluation report"


@dataclass(frozen=True, slots=True)
class Written:
    """What was written, and what it says in numbers.

    Attributes:
        page: the HTML file.
        figures: the PNG files (for white ground).
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
            figures[-1].write_bytes(picture.light)
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
            *(evaluated.run.config for evaluated in sources.runs),
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
    sections = []
    names = {name for evaluated in sources.runs for name in evaluated.summary["methods"]}
    for index, model in enumerate(sources.models, start=1):
        sections.append(model_section(model, f"model-{index}"))
    benches = sorted(sources.benches, key=bench_order)
    if benches:
        parts = tuple(bench_section(bench, name) for bench, name in _named(benches))
        sections.append(Section("Benchmarks", "benchmarks", (), parts))
        resumes = (bench for bench in benches if bench.name == "resume")
        names |= {point["method"] for bench in resumes for point in bench.points}
    if names:
        sections.append(Section("Methods", "methods", (methods_table(names),)))
    if sources.runs:
        blocks = tuple(failures(sources.runs))
        sections.append(Section("Failures and skipped rows", "failures", blocks))
    sections.append(Section("How to reproduce", "reproduce", tuple(_commands(sources))))
    return sections


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
            *(evaluated.run.config["command"] for evaluated in sources.runs),
            *(bench.document["command"] for bench in sources.benches),
        )
    )
    data = dict.fromkeys(
        f"{evaluated.run.config['data']}: SHA-256 {evaluated.run.config['data_sha256']}"
        for evaluated in sources.runs
        if evaluated.run.config.get("data_sha256")
    )
    blocks: list[Block] = [
        Text("These commands made the results, on the machines named above:"),
        Command(tuple(commands)),
    ]
    if data:
        blocks += [Text("With the data:"), Command(tuple(data))]
    return blocks
