"""Gathers the parts of one episode, before their number is fitted to a length."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from patchkv_evals.datasets import QARow
from patchkv_evals.episodes.episode import EpisodeSpec
from patchkv_evals.episodes.finds import (
    Find,
    filler,
    neutral_note,
    search_query,
    show,
    title_query,
)
from patchkv_evals.episodes.fitting import Stock
from patchkv_evals.episodes.kinds import CLOSED, answer_kind
from patchkv_evals.episodes.repeats import REPEATS
from patchkv_evals.episodes.sources import PassagePool, Sources, excerpt, sources
from patchkv_evals.episodes.substitution import Substitution, choose, forms, uses_surname
from patchkv_evals.text import flat, mentions

FLIPS = ("flip", *REPEATS, "chain")
PLANS = ("revise_plan", "multi", "chain")
REFRESHES = ("refresh", "multi", "chain")

RETRIES = 10
"""Edits of an episode of that kind."""

_MISSED = 2  # most passages of a try that misses
_CLEARED = 2
_SUMMARIZED = 3


@dataclass(frozen=True, slots=True)
class Parts:
    """What an episode is put together from.

    Attributes:
        evidence: the search whose result the answer needs.
        stale: what stands in its place before it is refreshed; empty if it is not refreshed.
        before_refresh: what kind of thing that is.
        misses: what the search finds until it finds the evidence, if it is tried again.
        block: the steps that are edited, in order; the evidence only if it belongs there.
        support: searches for the other gold passages.
        places: for the evidence and each of the support, where among the fillers, 0 to 1.
        names: forms of the answer; none where it is yes or no.
        flip: the substitution, if there is one.
        lender: id of the row whose answer it takes.
        borrowed: ids of the rows from which stale results and misses are.
        stock: fillers.
        used: how many of them the block and the evidence have taken.
    """

    evidence: Find
    stale: str
    before_refresh: Literal["missing", "stale"] | None
    misses: tuple[str, ...]
    block: tuple[Find, ...]
    support: tuple[Find, ...]
    places: tuple[float, ...]
    names: tuple[str, ...]
    flip: Substitution | None
    lender: str | None
    borrowed: tuple[str, ...]
    stock: Stock
    used: int


def gather(row: QARow, spec: EpisodeSpec, pool: PassagePool) -> Parts:
    """Gather the parts; the same arguments give the same parts.

    Args:
        row: the row.
        spec: what is wanted.
        pool: lends fillers and substitutes.

    Raises:
        EpisodeError: the row has no evidence, or its answer cannot be replaced.
    """
    rng = random.Random(f"{spec.seed} {row.dataset} {row.id}")
    closed = answer_kind(row.answers[0], row.question) == CLOSED
    names = () if closed else forms(row.answers, surnames=uses_surname(row))
    gold = sources(row, names, spec.passage_words)
    flip, lender = None, None
    if spec.kind in FLIPS:
        texts = "\n".join(f"{p.title}\n{p.text}" for p in (*gold.evidence, *gold.support))
        flip, lender = choose(row, texts, pool.candidates, rng)
    gatherer = _Gatherer(row, spec, pool, rng, (*names, *(flip.new if flip else ())))
    evidence = gatherer.evidence(gold)
    before_refresh, stale = gatherer.stale(evidence)
    misses = gatherer.misses(evidence)
    block = gatherer.block(evidence)
    support = tuple(filler(gatherer.key(), passage) for passage in gold.support)
    places = tuple(rng.random() for _ in range(len(support) + 1))
    return Parts(
        evidence,
        stale,
        before_refresh,
        misses,
        tuple(block),
        support,
        places,
        names,
        flip,
        lender,
        tuple(gatherer.borrowed),
        gatherer.stock,
        gatherer.used,
    )


class _Gatherer:
    """Takes fillers one after the other, and numbers the steps."""

    def __init__(
        self,
        row: QARow,
        spec: EpisodeSpec,
        pool: PassagePool,
        rng: random.Random,
        hidden: tuple[str, ...],
    ) -> None:
        self._row, self._spec, self._rng = row, spec, rng
        self._hidden = hidden  # names that nothing but the evidence may have
        self._keys = iter(range(1, 1_000_000))
        self.stock = Stock(self._fillers(pool))
        self.used = 0
        self.borrowed: list[str] = []

    def key(self) -> int:
        """The next step's key."""
        return next(self._keys)

    def evidence(self, gold: Sources) -> Find:
        """The search that brings the evidence."""
        passages = list(gold.evidence)
        title = title_query(passages[0]) if len(passages) == 1 else ""
        tells = not title or mentions(flat(title), self._hidden)
        query = search_query(self._row.question) if tells else title
        self._rng.shuffle(passages)
        return Find(self.key(), query, tuple(passages), neutral_note(self._rng))

    def stale(self, evidence: Find) -> tuple[Literal["missing", "stale"] | None, str]:
        """What stands in place of the evidence before it is refreshed."""
        if self._spec.kind not in REFRESHES:
            return None, ""
        if self._rng.random() < 0.5:
            return "missing", f'No results for "{evidence.query}".'
        return "stale", self._others(len(evidence.passages))

    def misses(self, evidence: Find) -> tuple[str, ...]:
        """What the search finds in its tries before the last."""
        if self._spec.kind != "retries":
            return ()
        count = min(len(evidence.passages), _MISSED)  # of a long result, ten would take too many
        return tuple(self._others(count) for _ in range(RETRIES))

    def _others(self, count: int) -> str:
        """So many passages which have nothing to do with the evidence."""
        finds = [self._next() for _ in range(count)]
        self.borrowed += [find.source for find in finds]
        return show([passage for find in finds for passage in find.passages])

    def block(self, evidence: Find) -> list[Find]:
        """The steps that are edited."""
        kind = self._spec.kind
        if kind in ("refresh", "flip", *REPEATS, "retries"):
            return [evidence]
        if kind == "clear":
            return [self._next() for _ in range(_CLEARED)]
        if kind == "summarize":
            fillers = [self._next() for _ in range(_SUMMARIZED - 1)]
            half = len(fillers) // 2
            return [*fillers[:half], evidence, *fillers[half:]]
        if kind == "revise_plan":
            return [self._next()]
        last = [self._next()] if kind == "chain" else []
        return [self._next(), self._next(), evidence, *last]

    def _next(self) -> Find:
        self.used += 1
        return self.stock.get(self.used - 1)

    def _fillers(self, pool: PassagePool) -> Iterator[Find]:
        for source, passage in pool.fillers(self._row, self._hidden, self._rng):
            yield filler(self.key(), excerpt(passage, self._spec.passage_words), source)
