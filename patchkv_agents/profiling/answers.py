"""Whether answers say the same, and whether one is out of date; by the rule of SQuAD's script."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable

ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

Normalize = Callable[[str], str]


def normalize_answer(answer: str) -> str:
    """Lower case, without punctuation, articles and extra white space (SQuAD, HotpotQA)."""
    plain = answer.lower().translate(_NO_PUNCTUATION)
    return " ".join(ARTICLE.sub(" ", plain).split())


def same_answer(answer: str, reference: str, normalize: Normalize = normalize_answer) -> bool:
    """Whether two answers are equal after normalisation; the reference is full prefill's."""
    return normalize(answer) == normalize(reference)


def stale_answer(
    prediction: str,
    old: Iterable[str],
    new: Iterable[str],
    normalize: Normalize = normalize_answer,
) -> bool:
    """Whether a prediction gives the answer from before the edit, and not the one from after it.

    It gives an answer if it has its words, normalised, in a row. Where the old answer is part of
    the new one, a prediction of the new one is not stale.
    """
    words = f" {normalize(prediction)} "

    def gives(answers: Iterable[str]) -> bool:
        normalized = (normalize(answer) for answer in answers)
        return any(f" {answer} " in words for answer in normalized if answer)

    return gives(old) and not gives(new)
