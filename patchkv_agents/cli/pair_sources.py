"""Sources of context pairs for `patchkv profile` and `patchkv validate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class PairSources:
    """The options that name pairs, and the pairs that they name."""

    pairs: Annotated[
        list[Path] | None,
        typer.Option(
            "--pairs",
            help="JSONL file: old and new messages, or versions, a line. May be repeated.",
            dir_okay=False,
            rich_help_panel=_GROUP,
        ),
    ] = None
    history: Annotated[
        Path | None,
        typer.Option(
            "--history",
            help="SQLite file of histories: the edits that your own agents made.",
            dir_okay=False,
            rich_help_panel=_GROUP,
        ),
    ] = None
    episodes: Annotated[
        list[str] | None,
        typer.Option(
            "--episodes",
            help="Edited episodes of a data set, such as hotpotqa. May be repeated.",
            rich_help_panel=_GROUP,
        ),
    ] = None
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            help="File of that data set, one for each --episodes; else Hugging Face `datasets` "
            "loads it.",
            rich_help_panel=_GROUP,
        ),
    ] = None
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Synthetic pairs that come with the package.", rich_help_panel=_GROUP
        ),
    ] = False
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help="Pairs of each kind of edit and data set.", rich_help_panel=_GROUP
        ),
    ] = None
    tokens: Annotated[
        int, typer.Option(min=1, help="Length of episodes.", rich_help_panel=_GROUP)
    ] = 2048
    edits: Annotated[
        str,
        typer.Option(
            help="Kinds of episodes, with commas between: refresh, flip, flip_noted, "
            "flip_answered, flip_planned, flip_summarized, flip_called, clear, summarize, "
            "revise_plan, multi, chain, retries.",
            rich_help_panel=_GROUP,
        ),
    ] = "refresh,flip,flip_noted,clear,summarize"

    def check(self) -> None:
        """Check what can be told before a model is loaded.

        Raises:
            InputError: nothing is named, a file is missing, or data sets and files do not fit.
        """
        if not (self.pairs or self.history or self.episodes or self.quick):
            raise InputError(
                "name the pairs: --pairs FILE, --history FILE, --episodes NAME or --quick"
            )
        if self.data and len(self.data) != len(self.episodes or ()):
            raise InputError("give one --data for each --episodes, in the same order, or none")
        history = [self.history] if self.history else []
        for file in (*(self.pairs or ()), *history, *(self.data or ())):
            if not file.exists():
                raise InputError(f"there is no file {file}: check the path")

    def read(self, tokenizer: PreTrainedTokenizerBase) -> list[PairSet]:
        """The pairs of all sources that are named, each a set of its own.

        Args:
            tokenizer: of the model.

        Raises:
            InputError: a source cannot be used.
            HistoryStoreError: the history is damaged.
        """
        from patchkv_agents.profiling.pair_readers import history_pairs, read_pairs
        from patchkv_agents.profiling.quick import quick_pairs

        sources = [read_pairs(file) for file in self.pairs or ()]
        if self.history is not None:
            sources.append(history_pairs(self.history))
        if self.quick:
            sources.append(quick_pairs())
        files: Sequence[Path | None] = self.data or [None] * len(self.episodes or ())
        sources += [
            self._episodes(dataset, file, tokenizer)
            for dataset, file in zip(self.episodes or (), files, strict=True)
        ]
        return [source.first(self.limit) for source in sources]

    def _episodes(
        self, dataset: str, file: Path | None, tokenizer: PreTrainedTokenizerBase
    ) -> PairSet:
        from patchkv_evals.datasets import load_hub, load_rows
        from patchkv_evals.profiling_pairs import episode_pairs

        loaded = load_hub(dataset) if file is None else load_rows(file, dataset)
        kinds = tuple(dict.fromkeys(name.strip() for name in self.edits.split(",")))
        return episode_pairs(
            dataset,
            loaded.rows,
            tokenizer,
            edits=cast("tuple[EpisodeKind, ...]", kinds),
            limit=self.limit,
            tokens=self.tokens,
        )


def check_out(out: Path) -> None:
    """Check that a profile can be written to a path, before the work that it takes to make one.

    Raises:
        InputError: its folder is missing, or it is a file that is no profile.
    """
    from patchkv_agents.errors import ProfileError
    from patchkv_agents.recovery.profile import Profile

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
    """Print on standard error how many pairs were left out, and why."""
    from patchkv_agents.context.excerpts import escaped

    for reason, count in Counter(each.reason for each in skipped).items():
        typer.echo(escaped(f"left out {plural(count, 'pair')}: {reason}"), err=True)
