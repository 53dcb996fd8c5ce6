"""`patchkv validate`: whether a profile's policy is good enough to be used unasked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchkv_agents.cli.model_options import Device, Dtype, load_options
from patchkv_agents.cli.pair_sources import (
    DEFAULT_EDITS,
    DEFAULT_TOKENS,
    DataFiles,
    Edits,
    Episodes,
    HistoryFile,
    Limit,
    PairFiles,
    Quick,
    Tokens,
    check_out,
    check_sources,
    read_sources,
    show_skipped,
)
from patchkv_agents.cli.profile_view import show_validation
from patchkv_agents.console import new_console
from patchkv_agents.context.excerpts import escaped
from patchkv_agents.errors import InputError

if TYPE_CHECKING:
    from patchkv_agents.profiling.pairs import PairSet
    from patchkv_agents.profiling.profile import Profile
    from patchkv_agents.profiling.trials import TrialProgress

_GROUP = "Thresholds"


def validate(
    model: Annotated[
        str, typer.Argument(help="smollm2 (embedded), a folder, or a Transformers model id.")
    ],
    profile: Annotated[
        str,
        typer.Option(help="File of the profile, or the name of one that comes with the package."),
    ],
    pairs: PairFiles = None,
    history: HistoryFile = None,
    episodes: Episodes = None,
    data: DataFiles = None,
    quick: Quick = False,
    limit: Limit = None,
    tokens: Tokens = DEFAULT_TOKENS,
    edits: Edits = DEFAULT_EDITS,
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    """Compare a profile's policy with full prefills, and record whether it passes.

    Pairs of tasks that the profile was fitted to are left out: of the same data, the validation
    half is used. Only a profile that has passed makes an engine recover approximately unasked.
    Exits with 1 if it does not pass.
    """
    check_sources(pairs, history, episodes, data, quick)
    if out is not None:
        check_out(out)
    from patchkv_agents.engine import Engine
    from patchkv_agents.profiling.gate import Thresholds
    from patchkv_agents.profiling.gate import validate as run_gate
    from patchkv_agents.profiling.pairs import joined
    from patchkv_agents.profiling.profile import Profile
    from patchkv_agents.profiling.shipped import profile_file
    from patchkv_agents.recovery import RecoveryPolicy

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

    def read(most: int | None) -> PairSet:
        return joined(
            read_sources(
                engine.tokenizer,
                pairs=pairs,
                history=history,
                episodes=episodes,
                data=data,
                quick=quick,
                limit=most,
                tokens=tokens,
                edits=edits,
            )
        )

    chosen = _unseen(loaded, read, limit)
    with _progress() as told:
        validation, skipped = run_gate(engine, loaded, chosen, thresholds=thresholds, progress=told)
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
    most, before = 2 * limit, -1  # about half of them is left out
    while True:
        pairs = read(most)
        is_all = len(pairs.pairs) == before
        try:
            left = unseen(profile, pairs).first(limit)
        except InputError:
            if is_all:
                raise
        else:
            found = Counter((pair.dataset, pair.kind) for pair in left.pairs)
            kinds = {(pair.dataset, pair.kind) for pair in pairs.pairs}
            if is_all or all(found[kind] >= limit for kind in kinds):
                return left
        most, before = 2 * most, len(pairs.pairs)


@contextmanager
def _progress() -> Iterator[Callable[[TrialProgress], None]]:
    """Shows on standard error where the validation stands."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = new_console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        bar = bars.add_task("validating", total=None)

        def told(state: TrialProgress) -> None:
            left = "" if state.left_s is None else f", about {state.left_s:.0f} s left"
            text = escaped(f"{state.doing}{left}")
            bars.update(bar, description=text, completed=state.done, total=state.total)
            if not console.is_terminal:
                console.print(f"{state.done} of {state.total}: {text}")

        yield told
