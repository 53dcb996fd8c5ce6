"""`patchkv eval`: methods on edited question-answering episodes, and several runs compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from patchkv_agents.cli.options import AsJson, ModelOption
from patchkv_agents.console import new_console, plural
from patchkv_agents.errors import InputError
from patchkv_agents.progress import show_progress

if TYPE_CHECKING:
    from patchkv_agents.recovery import RecoverySetup
    from patchkv_agents.recovery.profile import Profile
    from patchkv_evals.datasets import QARow
    from patchkv_evals.running import RunSpec


def evaluate(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Result folders to compare over, instead of running anything."),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="hotpotqa, 2wikimqa, triviaqa, musique or longbench."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="File of the data set; without it, Hugging Face `datasets` loads it."),
    ] = None,
    edit: Annotated[
        list[str] | None,
        typer.Option(
            help="refresh, flip, flip_noted, flip_answered, flip_planned, flip_summarized, "
            "flip_called, clear, summarize, revise_plan, multi, chain or retries; may be "
            "repeated. If left out: refresh."
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="main, ablations, all, or names with commas between.")
    ] = "main",
    model: ModelOption = "smollm2",
    recovery_profile: Annotated[
        str | None,
        typer.Option(
            help="The model's profile, from which patchkv, patchkv_published and the ablations are "
            "taken: a file, or the name of one that comes with the package."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Episodes of each edit; all if left out.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the edited context.")] = 2048,
    position: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Where the edit is, as a share.")
    ] = 0.2,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; a stopped run goes on there.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Resume so often, interleaved; times are medians.")
    ] = 1,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Length of the answers; at least 16 are generated.")
    ] = 24,
    seed: Annotated[int, typer.Option(help="Of the episodes, and of random rows.")] = 0,
    rows: Annotated[
        str, typer.Option(help="Use the rows in the order of the file, or a random one.")
    ] = "file",
    budget_minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Begin no episode after so many minutes.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure methods on edited agent episodes made from question-answering rows.

    Each method brings back the KV cache after the same edit, and is compared with a full prefill:
    quality, time, rows computed, bytes read. Results are appended episode by episode; the same
    command goes on where it was stopped, and --limit, --edit and --methods may grow. With result
    folders as arguments, all their runs are compared, model by model.
    """
    if folders:
        if dataset is not None or out is not None:
            raise InputError("give result folders to compare over, or --dataset and --out to run")
        _compare(folders, as_json)
        return
    if dataset is None or out is None:
        raise InputError(
            "name --dataset and --out to run, or result folders to compare: patchkv eval --help"
        )
    from patchkv_agents.cli.evaluate_view import show_summary
    from patchkv_agents.engine import Engine
    from patchkv_agents.recovery import RecoveryPolicy
    from patchkv_agents.recovery.profile import Profile
    from patchkv_evals.episodes import EpisodeKind
    from patchkv_evals.profiling_pairs import calibrated_on
    from patchkv_evals.running import RunSpec, run
    from patchkv_evals.running.spec import RowOrder

    # What is wrong is told before the model loads.
    profile = None if recovery_profile is None else Profile.load(recovery_profile)
    policies = _policies(methods, profile)
    seen = None if profile is None else calibrated_on(profile)
    spec = RunSpec(
        dataset=dataset,
        model=model,
        edits=cast("tuple[EpisodeKind, ...]", tuple(edit or ("refresh",))),
        limit=limit,
        tokens=tokens,
        position=position,
        seed=seed,
        rows=cast("RowOrder", rows),
        rounds=rounds,
        max_new_tokens=max_new_tokens,
        profile_sha256=None if profile is None else profile.setups_sha256,
    )
    spec, found = _rows(spec, data)
    with show_progress(f"loading {model}") as show:
        exact = RecoveryPolicy.exact()  # each call names its policy
        engine = Engine.from_pretrained(model, policy=exact, recovery_profile=profile)
        outcome = run(
            engine,
            found,
            policies,
            spec,
            out,
            calibrated_on=seen,
            budget_minutes=budget_minutes,
            progress=show,
        )
    summary = outcome.run.summary
    if summary["calibrated_on"]:
        typer.echo(
            f"The profile was fitted to {summary['calibrated_on']} of the "
            f"{plural(summary['episodes'], 'episode')}: they flatter the methods made from it.",
            err=True,
        )
    if as_json:
        typer.echo(json.dumps({**summary, "episodes_left": outcome.episodes_left}))
    else:
        show_summary(new_console(), summary)
    if outcome.episodes_left:
        typer.echo(
            f"The budget is spent; about {plural(outcome.episodes_left, 'episode')} left: the same "
            "command goes on.",
            err=True,
        )
    if outcome.run.failures and not outcome.run.records:
        raise typer.Exit(1)


def _policies(names: str, profile: Profile | None = None) -> list[RecoverySetup]:
    """The methods by their names, in the order of the names, made from a profile if given."""
    from patchkv_agents.recovery.named import method, method_names
    from patchkv_evals.running import ABLATIONS, FULL_PREFILL, MAIN_METHODS

    groups = {"main": MAIN_METHODS, "ablations": ABLATIONS, "all": method_names()}
    chosen = [name.strip() for name in names.split(",")]
    found = [name for part in chosen for name in groups.get(part, (part,))]
    return [method(name, profile) for name in dict.fromkeys(found) if name != FULL_PREFILL]


def _rows(spec: RunSpec, data: Path | None) -> tuple[RunSpec, Sequence[QARow]]:
    """The rows of the data set, and the specification with where they come from."""
    from dataclasses import replace

    from patchkv_evals.datasets import load_hub, load_rows
    from patchkv_evals.running.spec import digest_of

    loaded = load_hub(spec.dataset) if data is None else load_rows(data, spec.dataset)
    if loaded.skipped:
        typer.echo(loaded.report(), err=True)
    if not loaded.rows:
        raise InputError("the data set has no usable row")
    source = None if data is None else str(data)
    return replace(spec, data=source, data_sha256=digest_of(data, loaded.rows)), loaded.rows


def _compare(folders: Sequence[Path], as_json: bool) -> None:
    from patchkv_agents.cli.evaluate_view import show_pooled
    from patchkv_evals.running import pool, read_run

    models = pool([read_run(folder) for folder in folders])
    if as_json:
        document: dict[str, Any] = {"models": [pooled.to_dict() for pooled in models]}
        typer.echo(json.dumps(document))
        return
    for pooled in models:
        show_pooled(new_console(), pooled)
