"""`patchkv validate`: whether a profile's policy is good enough to be used by default."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchkv_agents.cli.options import (
    AsJson,
    Device,
    Dtype,
    ModelArgument,
    load_options,
    with_option_groups,
)
from patchkv_agents.cli.pair_sources import PairSources, check_out, show_skipped
from patchkv_agents.cli.profile_view import show_validation
from patchkv_agents.console import new_console
from patchkv_agents.context.excerpts import escaped
from patchkv_agents.errors import InputError
from patchkv_agents.progress import show_progress

if TYPE_CHECKING:
    from patchkv_agents.profiling.pairs import PairSet
    from patchkv_agents.recovery.profile import Profile

_GROUP = "Thresholds"


@with_option_groups
def validate(
    model: ModelArgument,
    profile: Annotated[
        str,
        typer.Option(help="File of the profile, or the name of one that comes with the package."),
    ],
    sources: PairSources,
    kl_median: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Largest median first-token KL, nats; 0.005 if left out.",
            rich_help_panel=_GROUP,
        ),
    ] = None,
    kl_p95: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Largest 95th percentile of it, nats; 0.1 if left out.",
            rich_help_panel=_GROUP,
        ),
    ] = None,
    top1: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Least share of first tokens that are the full prefill's likeliest; "
            "0.9 if left out.",
            rich_help_panel=_GROUP,
        ),
    ] = None,
    least_pairs: Annotated[
        int | None,
        typer.Option(min=1, help="Fewest pairs; 12 if left out.", rich_help_panel=_GROUP),
    ] = None,
    least_tasks: Annotated[
        int | None,
        typer.Option(min=1, help="Fewest tasks; 6 if left out.", rich_help_panel=_GROUP),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the profile with the result here, instead of into its file.",
            dir_okay=False,
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Compare a profile's policy with full prefills, and record whether it passes.

    Pairs of tasks that the profile was fitted to are left out: of the same data, the validation
    half is used. An engine recovers approximately by default only with a profile that has passed.
    Exits with 1 if it does not pass.
    """
    sources.check()
    if out is not None:
        check_out(out)
    from patchkv_agents.engine import Engine
    from patchkv_agents.profiling.gate import Thresholds
    from patchkv_agents.profiling.gate import validate as run_gate
    from patchkv_agents.profiling.pairs import joined
    from patchkv_agents.recovery import RecoveryPolicy
    from patchkv_agents.recovery.profile import Profile
    from patchkv_agents.recovery.shipped import profile_file

    limits: dict[str, Any] = {
        "first_token_kl_median": kl_median,
        "first_token_kl_p95": kl_p95,
        "top1_agree": top1,
        "pairs": least_pairs,
        "tasks": least_tasks,
    }
    # The gate's own defaults: it is too slow to import for the options' sake.
    thresholds = Thresholds(**{name: each for name, each in limits.items() if each is not None})
    loaded, file = Profile.load(profile), profile_file(profile)
    engine = Engine.from_pretrained(
        model,
        policy=RecoveryPolicy.exact(),
        recovery_profile=loaded,
        **load_options(device, dtype),
    )

    def read(limit: int | None) -> PairSet:
        return joined(replace(sources, limit=limit).read(engine.tokenizer))

    chosen = _unseen(loaded, read, sources.limit)
    with show_progress("validating") as progress:
        validation, skipped = run_gate(
            engine, loaded, chosen, thresholds=thresholds, progress=progress
        )
    is_shipped = file != Path(profile).expanduser()
    if out is not None or not is_shipped:
        replace(loaded, validation=validation).save(out or file)
    else:
        typer.echo("a profile of the package stays as it is: --out records the result", err=True)
    if as_json:
        document = {
            **validation.to_json(),
            "skipped": [{"id": each.id, "reason": each.reason} for each in skipped],
        }
        typer.echo(json.dumps(document))
    else:
        console = new_console()
        show_validation(console, validation)
        show_skipped(skipped)
        for reason in validation.reasons:
            console.print(escaped(f"not passed: {reason}"))
        if validation.passed:
            console.print("passed: engines with this profile use its policy")
    if not validation.passed:
        raise typer.Exit(1)


def _unseen(profile: Profile, read: Callable[[int | None], PairSet], limit: int | None) -> PairSet:
    """The pairs that a profile was not fitted to, `limit` of each kind as far as there are.

    Raises:
        InputError: it was fitted to all of them.
    """
    from patchkv_agents.profiling.gate import unseen

    if limit is None:
        return unseen(profile, read(None))
    limit_read, count_before = 2 * limit, -1  # about half of them is left out
    while True:
        pairs = read(limit_read)
        is_all = len(pairs.pairs) == count_before
        try:
            remaining = unseen(profile, pairs).first(limit)
        except InputError:
            if is_all:
                raise
        else:
            counts = Counter((pair.dataset, pair.kind) for pair in remaining.pairs)
            kinds = {(pair.dataset, pair.kind) for pair in pairs.pairs}
            if is_all or all(counts[kind] >= limit for kind in kinds):
                return remaining
        limit_read, count_before = 2 * limit_read, len(pairs.pairs)
