"""Chooses fillers so that a script gets the wanted length, with the edit at the wanted place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from patchkv_evals.episodes.counting import Measured
from patchkv_evals.episodes.finds import SHORTEST_TEXT, Find
from patchkv_evals.errors import EpisodeError

TOLERANCE = 0.02
_GOOD_LENGTH = 0.004
_GOOD_PLACE = 0.01
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Choice:
    """Fillers before and behind the fixed part."""

    before: tuple[Find, ...] = ()
    after: tuple[Find, ...] = ()


@dataclass(frozen=True, slots=True)
class _Try:
    """A choice, how far it is from the wanted length and place as shares of the whole."""

    error: float
    offset: float
    choice: Choice
    start: int

    @property
    def is_good(self) -> bool:
        return self.error <= _GOOD_LENGTH and self.offset <= _GOOD_PLACE


class Stock:
    """Fillers in a fixed order, made as they are needed."""

    def __init__(self, finds: Iterator[Find]) -> None:
        self._finds = finds
        self._made: list[Find] = []

    def get(self, index: int) -> Find:
        """The filler at that place.

        Raises:
            EpisodeError: there are not so many.
        """
        while len(self._made) <= index:
            find = next(self._finds, None)
            if find is None:
                raise EpisodeError("there are too few other passages for this length: pool more")
            self._made.append(find)
        return self._made[index]


class Fitter:
    """Fits one episode.

    Args:
        stock: the fillers.
        skip: how many of them are used already.
        count: tokens of a text.
        measure: length of the newest version with a choice of fillers, and where the edit starts.
    """

    def __init__(
        self,
        stock: Stock,
        skip: int,
        count: Callable[[str], int],
        measure: Callable[[Choice], tuple[Measured, int]],
    ) -> None:
        self._stock, self._skip, self._count, self._measure = stock, skip, count, measure
        self._per_step = 0.0

    def fit(self, tokens: int, position: float) -> tuple[Choice, int]:
        """Choose fillers for a length in tokens, with the edit at a share of it.

        Returns:
            The choice, and at which token the edit starts.

        Raises:
            EpisodeError: the length cannot be had.
        """
        base, start = self._measure(Choice())
        if base.tokens > tokens * (1 + TOLERANCE):
            raise EpisodeError(f"more than {tokens} tokens are needed for evidence and edit alone")
        self._per_step = self._overhead(base)
        in_front = max(0.0, position * tokens - start)
        room = float(tokens - base.tokens)
        tries: list[_Try] = []
        for _ in range(_ROUNDS):
            choice = self._choose(room, in_front)
            measured, start = self._measure(choice)
            error, offset = tokens - measured.tokens, position * tokens - start
            tries.append(_Try(abs(error) / tokens, abs(offset) / tokens, choice, start))
            if tries[-1].is_good:
                break
            room += error
            if choice.before:
                in_front = max(0.0, in_front + offset)
        best = min(tries, key=lambda each: (each.error > TOLERANCE / 2, each.offset, each.error))
        if best.error > TOLERANCE:
            raise EpisodeError(f"no choice of passages comes close to {tokens} tokens")
        return best.choice, best.start

    def _overhead(self, base: Measured) -> float:
        """What a step takes beside its texts: measured with one filler."""
        one = self._stock.get(self._skip)
        measured, _ = self._measure(Choice(after=(one,)))
        return measured.tokens - base.tokens - self._texts(one)

    def _texts(self, find: Find) -> int:
        return self._count(find.result) + 2 * self._count(find.query) + self._count(find.note)

    def _cost(self, find: Find) -> float:
        return self._per_step + self._texts(find)

    def _choose(self, room: float, in_front: float) -> Choice:
        in_front = min(in_front, room)
        before = self._fill(in_front, self._skip)
        if not before:
            in_front = 0.0
        after = self._fill(room - in_front, self._skip + len(before))
        if not after and before:  # too little room behind: all of it goes to the front
            before = self._fill(room, self._skip)
        return Choice(tuple(before), tuple(after))

    def _fill(self, room: float, first: int) -> list[Find]:
        """Fillers that fill the room; the last ones are cut. None where there is too little."""
        chosen: list[Find] = []
        cost = 0.0
        while cost < room:
            find = self._stock.get(first + len(chosen))
            chosen.append(find)
            cost += self._cost(find)
        for place in range(len(chosen) - 1, -1, -1):
            excess = cost - room
            if excess <= 0:
                break
            cut = self._cut(chosen[place], excess)
            cost -= self._cost(chosen[place]) - self._cost(cut)
            chosen[place] = cut
        return [] if cost - room > max(4, 0.05 * room) else chosen

    def _cut(self, find: Find, excess: float) -> Find:
        words = len(find.passages[0].text.split())
        per_word = self._count(find.passages[0].text) / words
        return find.shortened(max(SHORTEST_TEXT, min(words, round(words - excess / per_word))))
