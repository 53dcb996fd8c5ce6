"""Puts the parts of an episode together, and edits it, version by version."""

from __future__ import annotations

from dataclasses import dataclass, replace

from patchkv_agents.context import EditKind
from patchkv_evals.datasets import QARow
from patchkv_evals.episodes.episode import EpisodeSpec
from patchkv_evals.episodes.finds import script
from patchkv_evals.episodes.fitting import Choice
from patchkv_evals.episodes.parts import PLANS, REFRESHES, Parts
from patchkv_evals.episodes.repeats import REPEATS, Fact, repeated
from patchkv_evals.episodes.revisions import (
    Revised,
    Touch,
    clear_results,
    plans,
    replace_result,
    revise_plan,
    summarize,
)
from patchkv_evals.episodes.script import Script

_EDITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(REPEATS, ("flip",)),
    "multi": ("revise_plan", "clear", "refresh"),
    "chain": ("refresh", "clear", "flip", "revise_plan", "summarize"),
    "retries": ("refresh",),
}


@dataclass(frozen=True, slots=True)
class State:
    """A version before it is counted. See `EpisodeVersion`."""

    script: Script
    answers: tuple[str, ...]
    answerable: bool = True
    touches: tuple[Touch, ...] = ()


class Versions:
    """All versions of an episode, for any choice of fillers.

    Fillers stand before and behind the block. The other gold passages, and the evidence where it
    does not belong to the block, lie among the fillers behind it; the former before it, if the
    edit is wanted in the second half.
    """

    def __init__(self, row: QARow, spec: EpisodeSpec, parts: Parts) -> None:
        self._row, self._spec, self._parts = row, spec, parts

    def of(self, choice: Choice) -> list[State]:
        """The versions, oldest first.

        Raises:
            EpisodeError: the answer cannot be replaced cleanly.
        """
        kind, parts = self._spec.kind, self._parts
        base, revised_plan = self._base(choice)
        states = [State(base, self._row.answers)]
        if kind in REFRESHES:
            states = [self._without_evidence(base, parts.stale, edited=False)]
        if parts.misses:
            states = [self._without_evidence(base, parts.misses[0], edited=False)]
            for found in parts.misses[1:]:
                states.append(self._without_evidence(states[-1].script, found, edited=True))
        for edit in _EDITS.get(kind, (kind,)):
            states.append(self._after(edit, states[-1], revised_plan))
        if kind == "multi":  # all at once
            touches = tuple(touch for state in states for touch in state.touches)
            states = [states[0], replace(states[-1], touches=touches)]
        return states

    def _base(self, choice: Choice) -> tuple[Script, str]:
        """The script without any edit, and what its plan can be revised to."""
        spec, parts = self._spec, self._parts
        before, after = list(choice.before), list(choice.after)
        side = before if spec.position > 0.5 else after
        for find, place in zip(parts.support, parts.places[1:], strict=True):
            side.insert(round(place * len(side)), find)
        if parts.evidence not in parts.block:
            after.insert(round(parts.places[0] * len(after)), parts.evidence)
        finds = [*before, *parts.block, *after]
        made = script(self._row.question, finds, spec.seed)
        if parts.flip is not None and spec.kind in REPEATS:
            row, flip = self._row, parts.flip
            fact = Fact(row.question, parts.evidence, row.answers, flip.new[0])
            behind = [find.key for find in after]
            made = repeated(made, spec.kind, fact, behind, f"{spec.seed} {row.dataset} {row.id}")
        planner = len(before) if spec.kind in PLANS else 0
        ahead = [made.step(find.key) for find in finds[planner:]]
        plan, revised = plans(ahead)
        return made.with_step(replace(ahead[0], plan=plan)), revised

    def _without_evidence(self, script: Script, found: str, *, edited: bool) -> State:
        """The version in which the search has found something else."""
        key = self._parts.evidence.key
        revised = replace_result(script, key, found, EditKind.REFRESH_EVIDENCE)
        touches = revised.touches if edited else ()
        return State(revised.script, self._row.answers, answerable=False, touches=touches)

    def _after(self, edit: str, state: State, plan: str) -> State:
        """The version that one edit makes of another."""
        spec, parts, old = self._spec, self._parts, state.script
        key = parts.evidence.key
        answers, answerable = state.answers, state.answerable
        revised: Revised
        if edit == "refresh":
            result = parts.evidence.result
            revised = replace_result(old, key, result, EditKind.REFRESH_EVIDENCE)
            answerable = True
        elif edit == "flip":
            assert parts.flip is not None
            result = parts.flip.changed(old.step(key).result)
            revised = replace_result(old, key, result, EditKind.REPLACE_TOOL_RESULT)
            answers = parts.flip.new
        elif edit == "clear":
            keys = [find.key for find in parts.block if find is not parts.evidence]
            revised = clear_results(old, keys if spec.kind == "clear" else keys[1:2])
        elif edit == "revise_plan":
            revised = revise_plan(old, parts.block[0].key, plan)
        else:
            first = 2 if spec.kind == "chain" else 0
            keys = [find.key for find in parts.block[first:]]
            names = (*parts.names, *(parts.flip.new if parts.flip else ()))
            revised = summarize(old, tuple(keys), key, names)
            answerable = True
        return State(revised.script, answers, answerable, revised.touches)
