"""Scores of answers, equal to those of the data sets' official scripts.

Normalisation, F1 and exact match follow hotpotqa/hotpot `hotpot_evaluate_v1.py` (2WikiMultihopQA's
script is derived from it), mandarjoshi90/triviaqa `triviaqa_evaluation.py`, StonyBrookNLP/musique
`metrics/answer.py` (SQuAD's) and THUDM/LongBench `metrics.py`. Of several accepted answers the best
counts.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from patchkv_agents.profiling import answers
from patchkv_agents.profiling.answers import ARTICLE, normalize_answer

_TRIVIAQA_SPACES = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))


def normalize_triviaqa(answer: str) -> str:
    """The same as TriviaQA does it: punctuation, more of it, becomes spaces instead of going."""
    plain = answer.lower().translate(_TRIVIAQA_SPACES)
    return " ".join(ARTICLE.sub(" ", plain).split())


@dataclass(frozen=True, slots=True)
class Scorer:
    """How one data set scores answers.

    Attributes:
        normalize: makes answers comparable.
        closed: normalised answers that give no credit for words in common (HotpotQA's yes/no rule).
        empty_agrees: two answers of which normalisation leaves nothing have F1 1 (SQuAD), not 0.
    """

    normalize: Callable[[str], str] = normalize_answer
    closed: frozenset[str] = frozenset()
    empty_agrees: bool = False

    def f1(self, prediction: str, answers: Sequence[str]) -> float:
        """F1 of the words in common with the best of the accepted answers, 0 to 1."""
        return max(self._f1(prediction, answer) for answer in answers)

    def em(self, prediction: str, answers: Sequence[str]) -> float:
        """1 if the prediction is one of the accepted answers after normalisation, else 0."""
        return float(self.normalize(prediction) in {self.normalize(answer) for answer in answers})

    def _f1(self, prediction: str, answer: str) -> float:
        predicted, wanted = self.normalize(prediction), self.normalize(answer)
        if predicted != wanted and (predicted in self.closed or wanted in self.closed):
            return 0.0
        words, right = predicted.split(), wanted.split()
        if self.empty_agrees and not (words and right):
            return float(words == right)
        common = sum((Counter(words) & Counter(right)).values())
        # 2 P R / (P + R) with P = common / words and R = common / right
        return 2 * common / (len(words) + len(right)) if common else 0.0


_HOTPOT = Scorer(closed=frozenset(("yes", "no", "noanswer")))
_SCORERS = {
    "hotpotqa": _HOTPOT,
    "2wikimqa": _HOTPOT,
    "triviaqa": Scorer(normalize=normalize_triviaqa),
    "musique": Scorer(empty_agrees=True),
}
_LONGBENCH = Scorer()


def scorer(dataset: str) -> Scorer:
    """The scorer of a data set, by `QARow.dataset`; of LongBench's tasks and others SQuAD's F1."""
    return _SCORERS.get(dataset, _LONGBENCH)


def same_answer(answer: str, reference: str, score: Scorer = _LONGBENCH) -> bool:
    """Whether two answers are equal after a data set's normalisation; see `answers.same_answer`."""
    return answers.same_answer(answer, reference, score.normalize)


def stale_answer(
    prediction: str, old: Iterable[str], new: Iterable[str], score: Scorer = _LONGBENCH
) -> bool:
    """Whether a prediction gives the answer from before the edit; see `answers.stale_answer`."""
    return answers.stale_answer(prediction, old, new, score.normalize)


def answer_margin(new: Sequence[float], old: Sequence[float]) -> float:
    """Log-probability of the new answer minus that of the old one, in nats.

    Args:
        new: log-probability of each token of the new answer, given the context and those before it.
        old: the same for the old answer, in the same context.
    """
    return sum(new) - sum(old)


def answer_margin_recovery(
    margin: float, full_prefill: float, before_edit: float, *, least_change: float = 0.1
) -> float | None:
    """How much of full prefill's change of the margin a method shows: 1 all of it, 0 none.

    Args:
        margin: `answer_margin` in the recovered state.
        full_prefill: that of a full prefill of the new context.
        before_edit: that of the old context.
        least_change: where the edit moves full prefill's margin by less, in nats, the share says
            nothing.

    Returns:
        The share, or None where full prefill's change is too small.
    """
    change = full_prefill - before_edit
    return (margin - before_edit) / change if abs(change) >= least_change else None
