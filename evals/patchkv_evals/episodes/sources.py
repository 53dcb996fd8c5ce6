"""What an episode is made of: a row's evidence, and passages that fill the rest."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from patchkv_evals.datasets import Passage, QARow
from patchkv_evals.episodes.substitution import Candidate
from patchkv_evals.errors import EpisodeError
from patchkv_evals.text import flat, keywords, mentions, one_line, sentences

# TriviaQA has many gold documents, of which one is enough to know the answer.
_MAX_EVIDENCE = 3
_MAX_GUESSED = 2
_SHORTEST_FILLER = 20  # words


@dataclass(frozen=True, slots=True)
class Sources:
    """A row's gold passages, cut to length.

    Attributes:
        evidence: those that name the answer; if none does, the last gold one. They stand in one
            result, so that an edit of it changes all that the context says of the answer.
        support: the other gold ones, none of which names the answer.
    """

    evidence: tuple[Passage, ...]
    support: tuple[Passage, ...]


def sources(row: QARow, names: Iterable[str], words: int) -> Sources:
    """Sort a row's gold passages into evidence and support.

    Where the data set does not say what is gold, the first passages that name the answer are taken.

    Args:
        row: the row.
        names: forms of the answer; none if it is not one that a text names, as yes or no.
        words: length to which passages are cut.

    Raises:
        EpisodeError: no passage can be told to hold the answer.
    """
    names = tuple(names)
    flats = [flat(f"{passage.title} {passage.text}") for passage in row.passages]
    named = [p for p, text in zip(row.passages, flats, strict=True) if mentions(text, names)]
    gold = [p for p in row.passages if p.is_gold]
    if not gold:
        whole = row.answers if names else ()
        full = [p for p, text in zip(row.passages, flats, strict=True) if mentions(text, whole)]
        gold = [p for p in full if p.is_gold is None][:_MAX_GUESSED]
    evidence = [p for p in gold if p in named][:_MAX_EVIDENCE] or gold[-1:]
    if not evidence:
        raise EpisodeError("no passage is known to hold the answer")
    support = [p for p in gold if p not in evidence and p not in named]
    return Sources(
        tuple(excerpt(p, words, names, row) for p in evidence),
        tuple(excerpt(p, words, names, row) for p in support),
    )


def excerpt(
    passage: Passage, words: int, names: Sequence[str] = (), row: QARow | None = None
) -> Passage:
    """Cut a passage to about `words`, at sentences, from the front.

    Of a row's gold passage the supporting facts are kept, and two sentences: those that name the
    answer, if some do, and share most words with the question. An ellipsis stands for what is
    left out inside.
    """
    if len(passage.text.split()) <= words:
        return Passage(passage.title, one_line(passage.text), passage.is_gold)
    lines = [_around(line, words, names) for line in sentences(passage.text)]
    needed = [] if row is None else _needed([flat(line) for line in lines], names, row)
    kept: set[int] = set()
    left = words
    for index in dict.fromkeys([*needed, *range(len(lines))]):
        length = len(lines[index].split())
        if length <= left or not kept:
            kept.add(index)
            left -= length
        elif index not in needed:
            break
    text = ""
    for index in sorted(kept):
        gap = " ... " if index and index - 1 not in kept else " "
        text += f"{gap if text else ''}{lines[index]}"
    return Passage(passage.title, text, passage.is_gold)


def _needed(lines: Sequence[str], names: Sequence[str], row: QARow) -> list[int]:
    """The sentences of a gold passage, in flat form, that are kept first."""
    facts = " ".join(flat(fact.sentence) for fact in row.facts)
    asked = set(flat(" ".join(keywords(row.question))).split())
    every = range(len(lines))
    named = [index for index in every if mentions(lines[index], names)]
    best = sorted(named or every, key=lambda index: -len(asked & set(lines[index].split())))
    return [*(index for index in every if lines[index] in facts), *best[:2]]


def _around(line: str, words: int, names: Sequence[str]) -> str:
    """A sentence, or of one that is too long the words around the first name."""
    every = line.split()
    if len(every) <= words:
        return line
    place = 0
    if mentions(flat(line), names):
        starts = tuple(flat(name) for name in names if name.strip())
        ahead = (flat(" ".join(every[i : i + words])) for i in range(len(every)))
        place = next((i for i, text in enumerate(ahead) if text.startswith(starts)), 0)
    start = max(0, min(place - words // 2, len(every) - words))
    return " ".join(every[start : start + words])


class PassagePool:
    """Passages and answers of many rows, from which episodes of any of them take what they need.

    Args:
        rows: the more there are, the longer an episode can be, and the better a substitute fits.
    """

    def __init__(self, rows: Iterable[QARow]) -> None:
        self._rows = tuple(rows)
        self._entries = [(row, passage) for row in self._rows for passage in row.passages]
        self._flats: dict[str, str] = {}

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The rows' answers as substitutes."""
        return tuple(found for row in self._rows if (found := Candidate.of(row)) is not None)

    def fillers(
        self, row: QARow, names: Iterable[str], rng: random.Random
    ) -> Iterator[tuple[str, Passage]]:
        """Distractors for a row with the ids of the rows they are from: its own first.

        None has one of the names, none comes twice, and none is very short.
        """
        names = tuple(names)
        own = [(row, passage) for passage in row.passages if not passage.is_gold]
        rng.shuffle(own)
        others = rng.sample(self._entries, len(self._entries))
        seen = {_start(passage) for passage in row.passages if passage.is_gold}
        for source, passage in (*own, *(entry for entry in others if entry[0].id != row.id)):
            if len(passage.text.split()) < _SHORTEST_FILLER or _start(passage) in seen:
                continue
            seen.add(_start(passage))
            if not mentions(self._flat(passage), names):
                yield source.id, passage

    def _flat(self, passage: Passage) -> str:
        text = f"{passage.title} {passage.text}"
        found = self._flats.get(text)
        if found is None:
            found = self._flats[text] = flat(text)
        return found


def _start(passage: Passage) -> str:
    return one_line(passage.text)[:80]
