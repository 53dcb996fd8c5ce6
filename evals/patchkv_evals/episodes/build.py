"""Builds edited episodes from rows."""

from __future__ import annotations

from collections.abc import Iterable

from patchkv_evals.datasets import QARow
from patchkv_evals.episodes.counting import Measured, TokenCounter
from patchkv_evals.episodes.episode import (
    Episode,
    EpisodeSet,
    EpisodeSpec,
    EpisodeVersion,
    Provenance,
    SkippedRow,
)
from patchkv_evals.episodes.fitting import Choice, Fitter
from patchkv_evals.episodes.parts import gather
from patchkv_evals.episodes.script import Script
from patchkv_evals.episodes.sources import PassagePool
from patchkv_evals.episodes.versions import State, Versions
from patchkv_evals.errors import EpisodeError


def build_episodes(
    rows: Iterable[QARow],
    specs: Iterable[EpisodeSpec],
    *,
    pool: PassagePool,
    counter: TokenCounter,
    limit: int | None = None,
) -> EpisodeSet:
    """Build an episode of each row for each spec, as far as that can be done.

    Args:
        rows: the rows, in the order of their use.
        specs: what episodes are wanted.
        pool: lends distractors and substitutes; usually made of the same rows, or of more.
        counter: counts tokens, such as `RenderedCounter(tokenizer)`.
        limit: stop after so many episodes of each spec.

    Returns:
        The episodes, spec by spec, and the rows that gave none with the reasons.
    """
    rows = tuple(rows)
    episodes: list[Episode] = []
    skipped: list[SkippedRow] = []
    for spec in specs:
        made = 0
        for row in rows:
            if limit is not None and made >= limit:
                break
            try:
                episodes.append(build_episode(row, spec, pool=pool, counter=counter))
                made += 1
            except EpisodeError as error:
                skipped.append(SkippedRow(row.id, spec.kind, str(error)))
    return EpisodeSet(tuple(episodes), tuple(skipped))


def build_episode(
    row: QARow, spec: EpisodeSpec, *, pool: PassagePool, counter: TokenCounter
) -> Episode:
    """Build an episode of a row. The same arguments give an equal episode.

    Raises:
        EpisodeError: it cannot be done with this row; the message is the reason.
    """
    parts = gather(row, spec, pool)
    versions = Versions(row, spec, parts)

    def measure(choice: Choice) -> tuple[Measured, int]:
        states = versions.of(choice)
        measured = counter.measure(states[-1].script.conversation())
        return measured, measured.starts[_first_edited(states)]

    fitter = Fitter(parts.stock, parts.used, counter.text, measure)
    choice, start = fitter.fit(spec.tokens, spec.position)
    states = versions.of(choice)
    counted = tuple(_counted(state, old, counter) for old, state in _with_old(states))
    finds = (*choice.before, *parts.block, *choice.after)
    sources = [*(find.source for find in finds), *parts.borrowed]
    lenders = dict.fromkeys(source for source in sources if source not in ("", row.id))
    return Episode(
        f"{row.dataset}/{row.id}/{spec.kind}/{spec.seed}",
        row.question,
        counted,
        Provenance(
            row.dataset,
            row.id,
            spec,
            start / counted[-1].tokens,
            tuple(lenders),
            parts.lender,
            parts.before_refresh,
        ),
    )


def _with_old(states: list[State]) -> list[tuple[Script, State]]:
    """Each state with the script it was made of; the first one with its own."""
    return [(states[max(0, number - 1)].script, state) for number, state in enumerate(states)]


def _first_edited(states: list[State]) -> int:
    """The first message that any edit touches; all versions have it at the same place."""
    return min(
        index
        for old, state in _with_old(states)
        for touch in state.touches
        for index in touch.messages(old)
    )


def _counted(state: State, old: Script, counter: TokenCounter) -> EpisodeVersion:
    context = state.script.conversation()
    return EpisodeVersion(
        context,
        state.answers,
        state.answerable,
        tuple(touch.declare(old, state.script) for touch in state.touches),
        counter.measure(context).tokens,
    )
