"""`patchkv report`: results of evaluations and benchmarks as one page with figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from patchkv_agents.cli.options import AsJson
from patchkv_agents.console import new_console, plural


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Folders that 'patchkv eval --out' and 'patchkv bench --out' wrote, or folders of "
            "such folders.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="The page. Its figures also go to a folder beside it.")
    ] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write results as one HTML page: targets, quality against time, tables, figures."""
    from patchkv_evals.report import write_report

    if not as_json:
        new_console(stderr=True).print("Drawing the figures ...")
    written = write_report(folders, out)
    if as_json:
        document = {
            "page": str(written.page),
            "figures": [str(figure) for figure in written.figures],
            "models": written.models,
        }
        typer.echo(json.dumps(document))
        return
    console = new_console()
    for line in written.headlines:
        console.print(line)
    figures = plural(len(written.figures), "figure")
    console.print(f"{written.page}, {figures} in {written.page.stem}-figures")
