"""Searches with their results, before they become the steps of a script."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from patchkv_evals.datasets import Passage
from patchkv_evals.episodes.script import Script, Step
from patchkv_evals.text import cut, keywords, sentences

_NOTE_WORDS = 25
_QUERY_WORDS = 8
SHORTEST_TEXT = 12  # words, to which a filler may be cut

_INTENTS = (
    'Next I look up "{}".',
    'Now I search for "{}".',
    'Let me search for "{}".',
    'Looking up "{}" may help.',
    'I also want to read about "{}".',
)
_NEUTRAL_NOTES = (
    "to be weighed against the other results.",
    "keep this in mind for the answer.",
    "come back to this result when answering.",
)


@dataclass(frozen=True, slots=True)
class Find:
    """A search, its result, and what the assistant notes about it.

    Attributes:
        key: names it in all versions.
        query: of the search.
        passages: the result.
        note: an extract, or a phrase that tells nothing where the result is edited.
        source: id of the row that lent the passages, if they are fillers.
    """

    key: int
    query: str
    passages: tuple[Passage, ...]
    note: str
    source: str = ""

    @property
    def result(self) -> str:
        """The passages as text."""
        return show(self.passages)

    def shortened(self, words: int) -> Find:
        """The find with its one passage cut to some words; the note says no more than it."""
        (passage,) = self.passages
        shorter = replace(passage, text=cut(passage.text, words))
        return replace(self, passages=(shorter,), note=cut(self.note, words))


def show(passages: Sequence[Passage]) -> str:
    """Passages as a search tool shows them."""
    return "\n\n".join(f"{p.title}\n{p.text}" if p.title else p.text for p in passages)


def filler(key: int, passage: Passage, source: str = "") -> Find:
    """A find of a passage that does not name the answer: query and note are taken from it."""
    line = next(iter(sentences(passage.text)), passage.text)
    query = title_query(passage) or search_query(line)
    return Find(key, query, (passage,), cut(line, _NOTE_WORDS), source)


def title_query(passage: Passage) -> str:
    """A passage's title as a query, without the dots of a title that was cut."""
    return passage.title.rstrip(" .…|-").replace('"', "")


def search_query(text: str) -> str:
    """A query made of the first words of a question or a sentence that say something."""
    return " ".join(keywords(text.replace('"', ""))[:_QUERY_WORDS])


def neutral_note(rng: random.Random) -> str:
    """A note that stays true whatever the result says."""
    return rng.choice(_NEUTRAL_NOTES)


def script(question: str, finds: Sequence[Find], seed: int) -> Script:
    """Write finds out as steps; each step's thought has the note on the one before."""
    steps = []
    note = ""
    for find in finds:
        # By key, so that a step reads the same whatever stands around it.
        intent = random.Random(f"{seed} {find.key}").choice(_INTENTS).format(find.query)
        thought = f"Note: {note}\n{intent}" if note else intent
        steps.append(Step(find.key, thought, find.query, find.result))
        note = find.note
    return Script(question, tuple(steps), f"Note: {note}\nI have what I need now.")
