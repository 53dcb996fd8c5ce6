"""What an edited episode is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, get_args

from patchkv_agents.context import Conversation, Edit
from patchkv_evals.errors import EpisodeError

EpisodeKind = Literal[
    "refresh",
    "flip",
    "flip_noted",
    "flip_answered",
    "flip_planned",
    "flip_summarized",
    "flip_called",
    "clear",
    "summarize",
    "revise_plan",
    "multi",
    "chain",
    "retries",
]
KINDS: tuple[EpisodeKind, ...] = get_args(EpisodeKind)


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """What is wanted of an episode.

    Attributes:
        kind: what is edited:

            - `refresh`: missing or stale evidence is replaced by the gold passage;
            - `flip`: the answer's name is replaced by another one in the evidence;
            - `flip_noted`: the same, and a note behind it names the answer to come as a guess that
              the evidence is to decide: refuted in the old version, right in the new one;
            - `flip_answered`: the same as `flip`, and behind it the assistant has already given the
              old answer;
            - `flip_planned`, `flip_summarized`: and a plan, or a summary, behind it names it;
            - `flip_called`: and a search behind it has the old answer as its query;
            - `clear`: results of earlier searches are replaced by a placeholder;
            - `summarize`: several steps are replaced by an extractive summary that keeps the whole
              evidence;
            - `revise_plan`: the plan is rewritten;
            - `multi`: plan revised, a result cleared and the evidence refreshed at once;
            - `chain`: refresh, clear, flip, revise_plan, summarize, one after the other, with the
              question after each;
            - `retries`: the search for the evidence is tried again ten times, with the question
              after each; nine times it finds other passages, and then the gold one.
        tokens: rendered length of the newest version, generation prompt included; kept to 2 %.
            Versions before it are longer where the edit removes text.
        position: where the first edited message starts, as a share of the newest version; as near
            as steps of some 100 tokens and the parts that cannot be moved allow.
        passage_words: passages are shown up to this length, cut at sentences.
        seed: the same seed gives the same episode.
    """

    kind: EpisodeKind
    tokens: int = 2048
    position: float = 0.2
    passage_words: int = 120
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise EpisodeError(f"No episodes of kind {self.kind!r}; choose of {', '.join(KINDS)}.")
        if not 0 <= self.position <= 1:
            raise EpisodeError(f"The edit's position is a share from 0 to 1, not {self.position}.")
        if self.tokens < 1 or self.passage_words < 20:
            raise EpisodeError("tokens start at 1, passage_words at 20.")


@dataclass(frozen=True, slots=True)
class EpisodeVersion:
    """One version of the context.

    Attributes:
        context: ends with the user's question.
        answers: accepted answers to it, as this version has it.
        answerable: whether the context holds the evidence; if not, `answers` are those of the data
            set all the same. Where a data set names no gold passages, a guess by the answer's name.
        edits: what changed since the version before, declared; empty for the first.
        tokens: rendered length.
    """

    context: Conversation
    answers: tuple[str, ...]
    answerable: bool
    edits: tuple[Edit, ...] = field(compare=False)  # each has an id and a time of its own
    tokens: int


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where an episode comes from.

    Attributes:
        dataset: data set of the row.
        row_id: the row.
        spec: what was wanted.
        position: where the first edited message starts, as a share of the newest version.
        distractors: ids of the rows that lent passages, in the order of their use.
        substitute_from: the row whose answer took the place of this one's, if one did.
        before_refresh: what stood in place of the evidence, if it was refreshed.
    """

    dataset: str
    row_id: str
    spec: EpisodeSpec
    position: float
    distractors: tuple[str, ...]
    substitute_from: str | None = None
    before_refresh: Literal["missing", "stale"] | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """A conversation in two versions, or more for a chain, and what is known about them.

    Attributes:
        id: data set, row, kind and seed in one.
        question: what the last message of each version asks.
        versions: oldest first; never fewer than two.
        provenance: where it comes from.
    """

    id: str
    question: str
    versions: tuple[EpisodeVersion, ...]
    provenance: Provenance

    @property
    def old(self) -> EpisodeVersion:
        """The version before the (last) edit."""
        return self.versions[-2]

    @property
    def new(self) -> EpisodeVersion:
        """The newest version."""
        return self.versions[-1]

    def stale_answers(self, version: int = -1) -> tuple[str, ...]:
        """Answers that were right once and are not any more in a version; empty if none."""
        upto = self.versions[: version % len(self.versions)]
        now = self.versions[version].answers
        was = (answer for earlier in upto if earlier.answerable for answer in earlier.answers)
        return tuple(dict.fromkeys(answer for answer in was if answer not in now))


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row of which no episode could be made, and why."""

    row_id: str
    kind: EpisodeKind
    reason: str


@dataclass(frozen=True, slots=True)
class EpisodeSet:
    """Episodes, and the rows that gave none."""

    episodes: tuple[Episode, ...]
    skipped: tuple[SkippedRow, ...] = ()

    def report(self) -> str:
        """How many episodes there are, and a line for each kind and reason of skipping."""
        reasons = Counter((entry.kind, entry.reason) for entry in self.skipped)
        lines = [f"{len(self.episodes)} episodes"]
        lines += [
            f"{count} rows skipped for {kind}: {reason}"
            for (kind, reason), count in reasons.most_common()
        ]
        return "\n".join(lines)
