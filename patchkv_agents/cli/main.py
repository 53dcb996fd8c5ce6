"""The `patchkv` command line: its commands and error handling.

A command is a plain function with typer options, in a module of its own, which imports what is
slow (torch, transformers) inside the function: `patchkv --help` loads none of it. To add one,
import its module here and add a line below `app`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from patchkv_agents import __version__
from patchkv_agents.cli import (
    bench,
    demo,
    diff,
    evaluate,
    explain,
    log,
    models,
    plan_cost,
    profile,
    report,
    serve,
    show,
    validate,
)
from patchkv_agents.errors import PatchKVError

INTERRUPTED = 130

app = typer.Typer(
    name="patchkv",
    help="Recover the KV cache of an agent whose context was edited, instead of prefilling again.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.bench, name="bench")
app.add_typer(profile.profile, name="profile")
app.command(name="demo")(demo.demo)
app.command(name="diff")(diff.diff)
app.command(name="log")(log.log)
app.command(name="models")(models.models)
app.command(name="show")(show.show)
app.command(name="explain")(explain.explain)
app.command(name="eval")(evaluate.evaluate)
app.command(name="validate")(validate.validate)
app.command(name="report")(report.report)
app.command(name="serve")(serve.serve)
app.command(name="plan-cost")(plan_cost.plan_cost)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"patchkv {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that stand before the command."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted.

    Args:
        argv: the arguments after the program's name; those of the process where None.

    Raises:
        SystemExit: always.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        # Messages may hold what the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(args=None if argv is None else list(argv), prog_name="patchkv")
    except PatchKVError as error:
        from patchkv_agents.context.excerpts import escaped

        # One plain message: the text may hold anything, so no markup, no control characters.
        print(f"patchkv: {escaped(str(error))}", file=sys.stderr)
        sys.exit(error.exit_status)
    except OSError as error:
        print(f"patchkv: cannot write the output: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
