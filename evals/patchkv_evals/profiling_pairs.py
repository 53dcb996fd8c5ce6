"""Pairs for profiling, out of edited episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from patchkv_agents.profiling.gate import fitted_marks, marks_of
from patchkv_agents.profiling.pairs import ContextPair, PairSet, Skipped, pair_set
from patchkv_evals.datasets import QARow
from patchkv_evals.episodes import (
    Episode,
    EpisodeKind,
    EpisodeSpec,
    PassagePool,
    RenderedCounter,
    build_episodes,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from patchkv_agents.recovery.profile import Profile


def episode_pairs(
    dataset: str,
    rows: Sequence[QARow],
    tokenizer: PreTrainedTokenizerBase,
    *,
    edits: Sequence[EpisodeKind],
    limit: int | None,
    tokens: int,
    position: float = 0.2,
    seed: int = 0,
) -> PairSet:
    """The edits of episodes as pairs: one of each episode, and several of a chain.

    All pairs of a row are of one task.

    Args:
        dataset: name of the set.
        rows: in the order of their use.
        tokenizer: of the model.
        edits: kinds of episodes.
        limit: of episodes of each kind; None is no limit.
        tokens, position, seed: see `EpisodeSpec`.

    Raises:
        EpisodeError: a kind is unknown, or a number out of its range.
    """
    specs = [EpisodeSpec(kind, tokens=tokens, position=position, seed=seed) for kind in edits]
    made = build_episodes(
        rows, specs, pool=PassagePool(rows), counter=RenderedCounter(tokenizer), limit=limit
    )
    return pair_set(
        dataset,
        (pair for episode in made.episodes for pair in pairs_of(episode)),
        [Skipped(f"{skip.row_id} ({skip.kind})", skip.reason) for skip in made.skipped],
    )


def pairs_of(episode: Episode) -> list[ContextPair]:
    """The edits of one episode, in order."""
    source, last = episode.provenance, len(episode.versions) - 1
    return [
        ContextPair(
            id=episode.id if last == 1 else f"{episode.id}/{number}",
            task=source.row_id,
            kind=source.spec.kind,
            dataset=source.dataset,
            old=episode.versions[number - 1].context,
            new=episode.versions[number].context,
            edits=episode.versions[number].edits,
            answers=episode.versions[number].answers,
            stale_answers=episode.stale_answers(number),
        )
        for number in range(1, last + 1)
    ]


def calibrated_on(profile: Profile) -> Callable[[Episode], bool]:
    """Tells of an episode whether the profile was fitted to its row, or to one of its contexts.

    Raises:
        ProfileError: the profile does not say what it was fitted to.
    """
    marks = fitted_marks(profile)
    return lambda episode: any(not marks.isdisjoint(marks_of(pair)) for pair in pairs_of(episode))
