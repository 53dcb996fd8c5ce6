"""Which pairs a model can be profiled with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from patchkv_agents.alignment import align
from patchkv_agents.backends.transformers.verdict import SupportLevel
from patchkv_agents.context import render
from patchkv_agents.errors import ContextTooLongError, InputError, UnsupportedModelError
from patchkv_agents.profiling.pairs import ContextPair, PairSet, Skipped, task_groups
from patchkv_agents.profiling.windows import MIN_STRETCH, stretches

if TYPE_CHECKING:
    from patchkv_agents.engine import Engine

MIN_SUFFIX = 64
"""Fewest tokens behind an edit: of a shorter suffix, the query tail alone recomputes all."""

MIN_TASKS = 4
"""Fewest tasks: two to fit to, and two to see whether it holds."""


def check_model(engine: Engine) -> None:
    """Check that rows of a model can be moved at all.

    Raises:
        UnsupportedModelError: they cannot.
    """
    verdict = engine.support.verdict
    if verdict.level is SupportLevel.EXACT:
        raise UnsupportedModelError(
            f"keys of this model cannot be moved ({verdict.reason}): it recovers exactly and needs "
            "no profile"
        )


def usable(
    engine: Engine, pairs: PairSet, *, answer_tokens: int = 16
) -> tuple[tuple[ContextPair, ...], tuple[Skipped, ...]]:
    """The pairs that say something about a model, and why the others of the set do not.

    Raises:
        InputError: none does.
    """
    kept: list[ContextPair] = []
    skipped = list(pairs.skipped)
    for pair in pairs.pairs:
        reason = _why_not(engine, pair, answer_tokens)
        if reason is None:
            kept.append(pair)
        else:
            skipped.append(Skipped(pair.id, reason))
    if not kept:
        reasons = "; ".join(f"{skip.id}: {skip.reason}" for skip in skipped[:3])
        raise InputError(
            f"{pairs.name} has no pair that can be used ({reasons or 'there are none'}): give "
            "pairs of contexts that differ somewhere in front of a longer part that stays"
        )
    return tuple(kept), tuple(skipped)


def _why_not(engine: Engine, pair: ContextPair, answer_tokens: int) -> str | None:
    try:
        old, new = (render(each, engine.tokenizer).token_ids for each in (pair.old, pair.new))
    except InputError as error:  # the template refuses the messages
        return str(error)
    try:
        engine.check_length(max(len(old), len(new)) + answer_tokens)
    except ContextTooLongError:
        return f"{max(len(old), len(new)):,} tokens, and the model's limit is {engine.max_tokens:,}"
    alignment = align(old, new)
    if not alignment.hunks:
        return "old and new render to the same tokens"
    if alignment.recoverable_tokens < MIN_SUFFIX:
        return (
            f"{alignment.recoverable_tokens} tokens stay behind the edit, and at least "
            f"{MIN_SUFFIX} are needed"
        )
    return None


def check_stretches(engine: Engine, pairs: Sequence[ContextPair]) -> None:
    """Check that the length of a dirty window can be told from pairs.

    Raises:
        InputError: no edit has `MIN_STRETCH` tokens behind it up to the next one.
    """
    for pair in pairs:
        old, new = (render(each, engine.tokenizer).token_ids for each in (pair.old, pair.new))
        if max(stretches(align(old, new)), default=0) >= MIN_STRETCH:
            return
    raise InputError(
        f"no edit of the calibration pairs has {MIN_STRETCH} tokens behind it up to the next "
        "one: give pairs with longer contexts"
    )


def check_tasks(pairs: Sequence[ContextPair], *, least: int = MIN_TASKS) -> None:
    """Check that there are enough tasks; those that share a context are one.

    Args:
        pairs: all that can be used, or those of one split.
        least: tasks that are needed; fewer than `MIN_TASKS` for one split.

    Raises:
        InputError: there are too few.
    """
    tasks = len(set(task_groups(pairs).values()))
    if tasks < least:
        what = "a profile" if least >= MIN_TASKS else "each half of what a profile is made from"
        raise InputError(
            f"{len(pairs)} usable pairs of {tasks} tasks are too few for {what}: give pairs of "
            f"more tasks, at least {MIN_TASKS} in all ('task' in a JSONL file, threads in a "
            "history) that share no context, a higher --limit if there is one, or --quick"
        )
