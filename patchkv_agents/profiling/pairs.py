"""Pairs of contexts, before and after an edit: what a profile is fitted to and validated on.

They come from a JSONL file or a history database (`pair_readers`), from data sets
(`patchkv_evals.profiling_pairs`) or from texts shipped with the package (`quick`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from patchkv_agents.context import Conversation, Edit
from patchkv_agents.errors import InputError


@dataclass(frozen=True, slots=True)
class ContextPair:
    """A context before and after an edit.

    Attributes:
        id: unique among the pairs.
        task: whose revisions are the pairs of the same task; they stay in one split.
        kind: of the edit, such as `refresh` or `replace_tool_result`.
        dataset: where the pair comes from.
        old, new: the context before and after the edit.
        edits: what changed, as far as known.
        answers: right answers to the new context's question; empty if not known.
        stale_answers: answers that were right before the edit and are wrong behind it.
    """

    id: str
    task: str
    kind: str
    dataset: str
    old: Conversation
    new: Conversation
    edits: tuple[Edit, ...] = field(default=(), compare=False)  # with ids and times of their own
    answers: tuple[str, ...] = ()
    stale_answers: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Names the pair's contexts, 32 hexadecimal digits: equal where they are equal."""
        return _digest([context_digest(self.old), context_digest(self.new)])


@dataclass(frozen=True, slots=True)
class Skipped:
    """A pair that cannot be used, and why."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PairSet:
    """Pairs of one source.

    Attributes:
        name: of the source, for the record; of a file its name without folders.
        pairs: in the order of the source. No two have the same id or the same contexts.
        skipped: what the source has beside them.
    """

    name: str
    pairs: tuple[ContextPair, ...]
    skipped: tuple[Skipped, ...] = ()

    @property
    def tasks(self) -> int:
        """Number of tasks; those that share a context are one."""
        return len(set(task_groups(self.pairs).values()))

    @property
    def sha256(self) -> str:
        """Of the pairs' contexts, tasks, kinds and answers, in hex; in whatever order."""
        texts = sorted(
            json.dumps([p.task, p.kind, p.digest, p.answers, p.stale_answers]) for p in self.pairs
        )
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()

    def first(self, limit: int | None) -> PairSet:
        """The first `limit` pairs of each kind and data set; all if None."""
        if limit is None:
            return self
        found: Counter[tuple[str, str]] = Counter()
        kept = []
        for pair in self.pairs:
            found[pair.dataset, pair.kind] += 1
            if found[pair.dataset, pair.kind] <= limit:
                kept.append(pair)
        return PairSet(self.name, tuple(kept), self.skipped)


def pair_set(name: str, pairs: Iterable[ContextPair], skipped: Iterable[Skipped] = ()) -> PairSet:
    """Pairs of one source, without those whose contexts are those of an earlier one.

    Raises:
        InputError: two pairs have the same id.
    """
    kept: dict[str, ContextPair] = {}
    ids: set[str] = set()
    left_out = list(skipped)
    for pair in pairs:
        if pair.id in ids:
            raise InputError(f"{name} has two pairs of id '{pair.id}': give each an id of its own")
        ids.add(pair.id)
        if pair.digest in kept:
            left_out.append(Skipped(pair.id, f"the same contexts as {kept[pair.digest].id}"))
        elif pair.old == pair.new:
            left_out.append(Skipped(pair.id, "old and new are the same"))
        else:
            kept[pair.digest] = pair
    return PairSet(name, tuple(kept.values()), tuple(left_out))


def split(pairs: Sequence[ContextPair]) -> tuple[tuple[ContextPair, ...], tuple[ContextPair, ...]]:
    """Calibration and validation pairs: half and half of the tasks of each data set.

    All pairs of a task go to one of them, and so do tasks that share a context. The same pairs are
    split in the same way, in whatever order they come.
    """
    groups = task_groups(pairs)
    datasets: dict[str, set[str]] = {}
    for pair in pairs:
        datasets.setdefault(groups[pair.task], set()).add(pair.dataset)
    order = sorted(datasets, key=lambda group: (min(datasets[group]), _digest([group])))
    calibration = set(order[::2])
    return (
        tuple(pair for pair in pairs if groups[pair.task] in calibration),
        tuple(pair for pair in pairs if groups[pair.task] not in calibration),
    )


def task_groups(pairs: Iterable[ContextPair]) -> dict[str, str]:
    """Of each task the first one, by name, of those that share contexts with it.

    What is found on such tasks is not independent, by whatever names they go.
    """
    group: dict[str, str] = {}

    def root(task: str) -> str:
        while group.setdefault(task, task) != task:
            task = group[task]
        return task

    seen: dict[str, str] = {}
    for pair in pairs:
        for context in (pair.old, pair.new):
            known = seen.setdefault(context_digest(context), pair.task)
            first, second = sorted((root(known), root(pair.task)))
            group[second] = first
    return {task: root(task) for task in list(group)}


def joined(sets: Sequence[PairSet]) -> PairSet:
    """The pairs of several sources as those of one.

    Where two sources have the same id, that of the later one gets a number behind it.
    """
    if len(sets) == 1:
        return sets[0]
    ids: set[str] = set()
    pairs = []
    for number, each in enumerate(sets, start=1):
        for pair in each.pairs:
            id = f"{pair.id} ({number})" if pair.id in ids else pair.id
            pairs.append(replace(pair, id=id))
        ids.update(pair.id for pair in pairs)
    names = ", ".join(each.name for each in sets)
    return pair_set(names, pairs, (skip for each in sets for skip in each.skipped))


def context_digest(context: Conversation) -> str:
    """Names what a context says, 32 hexadecimal digits."""
    texts = [message.content_hash for message in context.messages]
    return _digest([*texts, "tools", *(tool.text for tool in context.tools)])


def _digest(texts: Sequence[str]) -> str:
    return hashlib.blake2b("\x1f".join(texts).encode(), digest_size=16).hexdigest()
