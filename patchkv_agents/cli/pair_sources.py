"""Where `patchkv profile` and `patchkv validate` take pairs of contexts from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from patchkv_agents.console import plural
from patchkv_agents.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from patchkv_agents.profiling.pairs import PairSet, Skipped
    from patchkv_evals.episodes import EpisodeKind

_GROUP = "Pairs of contexts"

PairFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--pairs",
        help="JSONL file: old and new messages, or versions, a line. May be repeated.",
        dir_okay=False,
        rich_help_panel=_GROUP,
    ),
]
HistoryFile = Annotated[
    Path | None,
    typer.Option(
        "--history",
        help="SQLite file of histories: the edits that your own agents made.",
        dir_okay=False,
        rich_help_panel=_GROUP,
    ),
]
Episodes = Annotated[
    list[str] | None,
    typer.Option(
        "--episodes",
        help="Edited episodes of a data set, such as hotpotqa. May be repeated.",
        rich_help_panel=_GROUP,
    ),
]
DataFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        help="File of that data set, one for each --episodes; else Hugging Face `datasets` loads "
        "it.",
        rich_help_panel=_GROUP,
    ),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="Synthetic pairs that come with the package.", rich_help_panel=_GROUP
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(min=1, help="Pairs of each kind of edit and data set.", rich_help_panel=_GROUP),
]
Tokens = Annotated[int, typer.Option(min=1, help="Length of episodes.", rich_help_panel=_GROUP)]
Edits = Annotated[
    str,
    typer.Option(
        help="Kinds of episodes, with commas between: refresh, flip, flip_noted, clear, "
        "summarize, revise_plan, multi, chain, retries.",
        rich_help_panel=_GROUP,
    ),
]

DEFAULT_TOKENS = 2048
DEFAULT_EDITS = "refresh,flip,clear,summarize"


def read_sources(
    tokenizer: PreTrainedTokenizerBase,
    *,
    pairs: Sequence[Path] | None,
    history: Path | None,
    episodes: Sequence[str] | None,
    data: Sequence[Path] | None,
    quick: bool,
    limit: int | None,
    tokens: int,
    edits: str,
) -> list[PairSet]:
    """The pairs of all sources that are named, each a set of its own.

    Args:
        tokenizer: of the model.
        pairs, history, episodes, data, quick, limit, tokens, edits: the options above, as
            `check_sources` has accepted them.

    Raises:
        InputError: a source cannot be used.
        HistoryStoreError: the history is damaged.
    """
    from patchkv_agents.profiling.pair_readers import history_pairs, read_pairs
    from patchkv_agents.profiling.quick import quick_pairs

    found = [read_pairs(file) for file in pairs or ()]
    if history is not None:
        found.append(history_pairs(history))
    if quick:
        found.append(quick_pairs())
    for number, dataset in enumerate(episodes or ()):
        file = data[number] if data else None
        found.append(_episodes(dataset, file, tokenizer, limit, tokens, edits))
    return [source.first(limit) for source in found]


def check_sources(
    pairs: Sequence[Path] | None,
    history: Path | None,
    episodes: Sequence[str] | None,
    data: Sequence[Path] | None,
    quick: bool,
) -> None:
    """Check what can be told before a model is loaded.

    Raises:
        InputError: nothing is named, a file is missing, or data sets and files do not fit.
    """
    if not (pairs or history or episodes or quick):
        raise InputError("name the pairs: --pairs FILE, --history FILE, --episodes NAME or --quick")
    if data and len(data) != len(episodes or ()):
        raise InputError("give one --data for each --episodes, in the same order, or none")
    for file in (*(pairs or ()), *([history] if history else ()), *(data or ())):
        if not file.exists():
            raise InputError(f"there is no file {file}: check the path")


def check_out(out: Path) -> None:
    """Check that a profile can be written to a path, before the work that it takes to make one.

    Raises:
        InputError: its folder is missing, or it is a file that is no profile.
    """
    from patchkv_agents.errors import ProfileError
    from patchkv_agents.profiling.profile import Profile

    if not out.resolve().parent.is_dir():
        raise InputError(f"there is no folder {out.resolve().parent}: make it, or change --out")
    if out.exists() and out.stat().st_size:
        try:
            Profile.load(out)
        except ProfileError as error:
            raise InputError(
                f"{out} would be overwritten, and is no profile of this release: delete it, or "
                "change --out"
            ) from error


def show_skipped(skipped: Sequence[Skipped]) -> None:
    """On standard error, how many pairs were left out, and why."""
    from patchkv_agents.context.excerpts import escaped

    for reason, count in Counter(each.reason for each in skipped).items():
        typer.echo(escaped(f"left out {plural(count, 'pair')}: {reason}"), err=True)


def _episodes(
    dataset: str,
    file: Path | None,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    tokens: int,
    edits: str,
) -> PairSet:
    from patchkv_evals.datasets import load_hub, load_rows
    from patchkv_evals.profiling_pairs import episode_pairs

    loaded = load_hub(dataset) if file is None else load_rows(file, dataset)
    kinds = tuple(dict.fromkeys(name.strip() for name in edits.split(",")))
    return episode_pairs(
        dataset,
        loaded.rows,
        tokenizer,
        edits=cast("tuple[EpisodeKind, ...]", kinds),
        limit=limit,
        tokens=tokens,
    )
