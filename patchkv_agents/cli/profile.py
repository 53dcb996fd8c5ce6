"""`patchkv profile`: fit a profile to a model, and show one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from patchkv_agents.cli.options import (
    AsJson,
    Device,
    Dtype,
    ModelArgument,
    load_options,
    with_option_groups,
)
from patchkv_agents.cli.pair_sources import PairSources, check_out, show_skipped
from patchkv_agents.cli.profile_view import show, show_profile
from patchkv_agents.console import new_console, plural
from patchkv_agents.context.excerpts import escaped
from patchkv_agents.errors import InputError
from patchkv_agents.progress import show_progress

_RUN = "run"


class _ModelOrCommand(TyperGroup):
    """A group whose command may be left out: what is not the name of one belongs to `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [_RUN, *args]
        return super().parse_args(ctx, args)


profile = typer.Typer(
    cls=_ModelOrCommand,
    help="Fit a profile to a model (patchkv profile MODEL --quick --out PROFILE), or show one.",
    no_args_is_help=True,
)
profile.command("show")(show)


@profile.command(_RUN)
@with_option_groups
def run(
    model: ModelArgument,
    out: Annotated[Path, typer.Option(help="File of the profile.", dir_okay=False)],
    sources: PairSources,
    most_repaired: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the suffix that may be recomputed.")
    ] = 0.10,
    precision: Annotated[
        bool, typer.Option(help="Fit the precision of stored rows; else the defaults stay.")
    ] = True,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Fit a profile to pairs of contexts; the command `run` may be left out.

    Each pair is a context before and after an edit. Half of the tasks are used for calibration;
    `patchkv validate` takes the other half. Progress is saved in PROFILE.work: the same command
    continues an interrupted run.
    """
    sources.check()
    if most_repaired <= 0.0:
        raise InputError("--most-repaired 0 leaves nothing to be recomputed: use more")
    check_out(out)
    with show_progress(f"loading {model}") as progress:
        from patchkv_agents.engine import Engine
        from patchkv_agents.profiling.calibrate import CalibrationConfig, calibrate
        from patchkv_agents.recovery import RecoveryPolicy
        from patchkv_agents.recovery.profile import Profile

        engine = Engine.from_pretrained(
            model, policy=RecoveryPolicy.exact(), **load_options(device, dtype)
        )
        pairs = sources.read(engine.tokenizer)
        config = CalibrationConfig(most_repaired=most_repaired, precision=precision)
        work = out.with_name(f"{out.name}.work")
        fitted, skipped = calibrate(engine, pairs, work, config=config, progress=progress)
    if out.exists() and out.stat().st_size:
        fitted = fitted.validated_as(Profile.load(out))
    fitted.save(out)
    show_skipped(skipped)
    if as_json:
        document: dict[str, Any] = {
            **fitted.to_json(),
            "skipped": [{"id": each.id, "reason": each.reason} for each in skipped],
        }
        typer.echo(json.dumps(document))
        return
    console = new_console()
    show_profile(console, fitted)
    count = plural(fitted.fit["pairs"]["calibration"], "pair")
    console.print(escaped(f"Written to {out}, fitted to {count}."))
