"""The edits: each makes a new version of a script, and says which steps it touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from patchkv_agents.context import Edit, EditKind
from patchkv_evals.episodes.script import CLEARED, Script, Step, Summary
from patchkv_evals.text import cut, flat, mentions, one_line, sentences

_GIST_WORDS = 25
_PLANNED = 3  # steps that a plan names


@dataclass(frozen=True, slots=True)
class Touch:
    """What an edit touched: the calls, the results, or all messages of some steps."""

    kind: EditKind
    keys: tuple[int, ...]
    what: Literal["call", "result", "all"]

    def declare(self, old: Script, new: Script) -> Edit:
        """The edit, with the indices of the messages in both versions."""
        return Edit.declare(
            self.kind, old=self.messages(old), new=self.messages(new), author="episode"
        )

    def messages(self, script: Script) -> Sequence[int]:
        """Indices of the messages in a version; of a summary once it stands there."""
        found = script.messages_of(self.keys)
        if self.what == "all":
            return found
        return found[0::2] if self.what == "call" else found[1::2]


@dataclass(frozen=True, slots=True)
class Revised:
    """A script after an edit."""

    script: Script
    touches: tuple[Touch, ...]


def replace_result(script: Script, key: int, result: str, kind: EditKind) -> Revised:
    """Give a step another result."""
    changed = script.with_step(replace(script.step(key), result=result))
    return Revised(changed, (Touch(kind, (key,), "result"),))


def clear_results(script: Script, keys: Iterable[int]) -> Revised:
    """Replace results by a placeholder."""
    touches: list[Touch] = []
    for key in keys:
        revised = replace_result(script, key, CLEARED, EditKind.REPLACE_TOOL_RESULT)
        script = revised.script
        touches += revised.touches
    return Revised(script, tuple(touches))


def revise_plan(script: Script, key: int, plan: str) -> Revised:
    """Replace the plan that a step has."""
    changed = script.with_step(replace(script.step(key), plan=plan))
    return Revised(changed, (Touch(EditKind.REVISE_PLAN, (key,), "call"),))


def summarize(
    script: Script, keys: tuple[int, ...], evidence: int, names: Sequence[str]
) -> Revised:
    """Replace steps by an extractive summary, in a message of the user's.

    Args:
        script: the version before.
        keys: of the steps, which are neighbors.
        evidence: the step whose result the answer needs, kept whole.
        names: forms of the answer; no sentence of the other steps with one of them is kept.
    """
    lines = ["Summary of the searches that stood here:"]
    for key in keys:
        step = script.step(key)
        if key == evidence:
            gist = one_line(step.result.removeprefix(f"{step.query}\n"))
        else:
            gist = _gist(step.result, names)
        lines.append(f"- {step.query}: {gist or 'read, nothing noted.'}")
    changed = script.with_summary(Summary(keys, "\n".join(lines)))
    return Revised(changed, (Touch(EditKind.SUMMARIZE, keys, "all"),))


def _gist(result: str, names: Sequence[str]) -> str:
    """The first sentence of a result without one of the names; the title's line counts as none."""
    body = result.split("\n", 1)[-1]
    plain = (line for line in sentences(body) if not mentions(flat(line), names))
    return cut(next(plain, ""), _GIST_WORDS)


def plans(steps: Sequence[Step]) -> tuple[str, str]:
    """A plan of four lines for some steps, and its revision.

    Args:
        steps: what is still to be looked up, in order; one at least.
    """
    queries = [step.query for step in steps[:_PLANNED]]
    revised = [*queries[1:2], *queries[:1], *queries[2:-1]]
    return _plan(queries), _plan(revised, revised=True)


def _plan(queries: Sequence[str], *, revised: bool = False) -> str:
    lines = [f'Look up "{query}".' for query in queries]
    if revised:
        lines.append("Search once more where two results disagree, and trust the newer one.")
        lines.append("Leave out what does not bear on the question, then answer.")
    else:
        lines.append("Compare what the results say, then answer.")
    head = "Revised plan:" if revised else "Plan:"
    return "\n".join([head, *(f"{n}. {line}" for n, line in enumerate(lines, 1))])
