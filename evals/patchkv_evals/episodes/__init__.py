"""Edited episodes of an agent, made from question-answering rows: the data of the evaluations.

An agent plans, searches, reads passages and takes notes, and is asked a question. Then its context
is edited in the middle. Old and new version, the declared edits and the answers of both versions
are known. Rows of one's own serve as well as those of the known data sets:

    rows = load_rows("my_rows.jsonl", "hotpotqa").rows  # or QARow(...) made by hand
    found = build_episodes(
        rows,
        [EpisodeSpec("refresh", tokens=4000), EpisodeSpec("flip", tokens=4000, position=0.5)],
        pool=PassagePool(rows),
        counter=RenderedCounter(tokenizer),
    )
    print(found.report())  # how many there are, and why rows were skipped
    episode = found.episodes[0]
    episode.old.context, episode.new.context, episode.new.edits, episode.new.answers
"""

from patchkv_evals.episodes.build import build_episode, build_episodes
from patchkv_evals.episodes.counting import Measured, RenderedCounter, TokenCounter
from patchkv_evals.episodes.episode import (
    KINDS,
    Episode,
    EpisodeKind,
    EpisodeSet,
    EpisodeSpec,
    EpisodeVersion,
    Provenance,
    SkippedRow,
)
from patchkv_evals.episodes.sources import PassagePool

__all__ = [
    "KINDS",
    "Episode",
    "EpisodeKind",
    "EpisodeSet",
    "EpisodeSpec",
    "EpisodeVersion",
    "Measured",
    "PassagePool",
    "Provenance",
    "RenderedCounter",
    "SkippedRow",
    "TokenCounter",
    "build_episode",
    "build_episodes",
]
