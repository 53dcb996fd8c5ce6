"""The one form that rows of all data sets take."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of evidence or a distractor.

    Attributes:
        title: may be empty.
        text: never empty.
        is_gold: whether the answer needs it; None where the data set does not say.
    """

    title: str
    text: str
    is_gold: bool | None = None


@dataclass(frozen=True, slots=True)
class SupportingFact:
    """A sentence that the answer rests on, and the title of its passage."""

    title: str
    sentence: str


@dataclass(frozen=True, slots=True)
class QARow:
    """A question with its answers and passages.

    Attributes:
        id: unique in its file.
        dataset: which data set, and so how answers are scored: see `patchkv_evals.metrics.scorer`.
        question: the question.
        answers: accepted answers, the data set's main one first, then aliases.
        passages: in the data set's order.
        facts: sentences that the answer rests on, where the data set names them.
    """

    id: str
    dataset: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    facts: tuple[SupportingFact, ...] = ()


class RowError(Exception):
    """A record cannot become a row; the message is the reason, for `Skipped`."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was left out.

    Attributes:
        index: of the record in its file, from 0.
        id: the record's id, empty if it has none.
        reason: why.
        part: `"row"`, or what of the row: the row itself is kept then.
    """

    index: int
    id: str
    reason: str
    part: str = "row"


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """Rows, and all that was left out on the way."""

    rows: tuple[QARow, ...]
    skipped: tuple[Skipped, ...] = ()

    def report(self) -> str:
        """How many rows there are, and a line for each reason with the first place it applies to.

        Empty parts, such as a passage without text, count as parts, not as rows.
        """
        lines = [f"{len(self.rows)} rows"]
        reasons = Counter((entry.part == "row", entry.reason) for entry in self.skipped)
        for (whole, reason), count in reasons.most_common():
            first = next(
                entry
                for entry in self.skipped
                if (entry.part == "row", entry.reason) == (whole, reason)
            )
            what = "rows" if whole else "parts of rows"
            place = f"record {first.index}" + (f", {first.id}" if first.id else "")
            if not whole:
                place += f", {first.part}"
            lines.append(f"{count} {what} left out: {reason} (first: {place})")
        return "\n".join(lines)


@dataclass(slots=True)
class Draft:
    """A row in the making, as the readers of the formats fill it. See `finish`."""

    id: str
    dataset: str
    question: str
    answers: list[str]
    passages: list[Passage] = field(default_factory=list)
    facts: list[SupportingFact] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """What of the row is left out, and why."""

    def finish(self) -> QARow:
        """Check what there is, drop passages without text and answers given twice.

        Raises:
            RowError: id, question, answers or passages are missing.
        """
        passages = []
        for number, passage in enumerate(self.passages):
            if passage.text.strip():
                passages.append(passage)
            else:
                self.left_out.append((f"passage {number} {passage.title!r}", "empty passage"))
        answers = tuple(dict.fromkeys(answer.strip() for answer in self.answers if answer.strip()))
        for name, value in (
            ("id", self.id.strip()),
            ("question", self.question.strip()),
            ("answer", answers),
            ("passage with text", passages),
        ):
            if not value:
                raise RowError(f"no {name}")
        facts = tuple(fact for fact in self.facts if fact.sentence.strip())
        return QARow(self.id, self.dataset, self.question.strip(), answers, tuple(passages), facts)
