"""Text behind an edited fact that repeats it, the same in the old and the new version.

An agent's context is full of conclusions: once the fact that they were drawn from is edited, they
stand where they stood. Where in the suffix they stand is drawn for each episode.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from patchkv_evals.episodes.finds import Find
from patchkv_evals.episodes.script import Exchange, Script, Step
from patchkv_evals.text import cut, flat, mentions, sentences

RepeatKind = Literal[
    "flip_noted", "flip_answered", "flip_planned", "flip_summarized", "flip_called"
]
REPEATS: tuple[RepeatKind, ...] = get_args(RepeatKind)

_SUMMARY_WORDS = 40
_CALL_KEY = 0  # the steps of an episode are numbered from 1


@dataclass(frozen=True, slots=True)
class Fact:
    """The fact that an edit changes.

    Attributes:
        question: what it answers.
        evidence: the search whose result tells it.
        old: forms of the answer before the edit.
        new: the answer after it.
    """

    question: str
    evidence: Find
    old: Sequence[str]
    new: str

    @property
    def name(self) -> str:
        """The old answer in the form in which the evidence has it."""
        text = flat(self.evidence.result)
        return next((name for name in self.old if mentions(text, [name])), self.old[0])

    @property
    def sentence(self) -> str:
        """The first sentence of the evidence that has the old answer, or the answer itself."""
        bodies = (sentences(passage.text) for passage in self.evidence.passages)
        named = (s for body in bodies for s in body if mentions(flat(s), [self.name]))
        sentence = cut(next(named, ""), _SUMMARY_WORDS)
        return sentence if mentions(flat(sentence), [self.name]) else self.name


def repeated(
    script: Script, kind: RepeatKind, fact: Fact, behind: Sequence[int], seed: str
) -> Script:
    """The script with the fact repeated in front of one of the steps behind it.

    Args:
        script: before any edit.
        kind: what repeats the fact; see `EpisodeSpec`.
        fact: the fact.
        behind: keys of the steps behind the evidence, in order; with none, it is repeated behind
            the last step.
        seed: draws the step. A note stands in front of the one in the middle.
    """
    place = len(behind) // 2
    if kind != "flip_noted" and behind:
        place = random.Random(seed).randrange(len(behind))
    key = behind[place] if behind else None
    query, name = fact.evidence.query, fact.name
    if kind == "flip_noted":
        # True in both versions: a guess that the result refutes, and then does not.
        return script.with_note(
            key,
            f'Note: from memory, the answer to "{fact.question}" could be {fact.new}; the result '
            f'for "{query}" decides.',
        )
    if kind == "flip_planned":
        return script.with_note(
            key,
            f"Plan from here:\n1. Read what else is said of {name}.\n"
            f"2. Look for a result that contradicts.\n3. If there is none, answer {name}.",
        )
    if kind == "flip_summarized":
        return script.with_note(key, f"Summary so far:\n- {query}: {fact.sentence}")
    if kind == "flip_called":
        call = f'Next I look up "{name}".'
        return script.with_item(Step(_CALL_KEY, call, name, f'No results for "{name}".'), key)
    answer = f'My answer so far: {name}, by the result for "{query}".'
    return script.with_item(Exchange(answer, "Thanks. Search on, to be sure."), key)
