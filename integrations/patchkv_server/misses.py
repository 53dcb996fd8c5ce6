"""Why a request could not be served from an exact prefix alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from patchkv_agents.context.explaining.causes import Cause
from patchkv_agents.context.explaining.explain import Explanation, Renderer, explain
from patchkv_agents.engine.outcomes import AnsweredCall
from patchkv_agents.errors import PatchKVError

SHORTEST_LOSS = 32
"""Fewer tokens with old state behind the first difference are no miss: the prompt for an answer
stands behind every context."""
MAX_LATER = 8
_LONGEST_ROLE = 20  # a client may write anything there

_NO_STATE = "no stored state of this conversation was left"
_NO_STATE_REMEDY = "Give the server a larger memory budget, or a store that keeps what it drops."


@dataclass(frozen=True, slots=True)
class Excerpts:
    """Texts of the context around a miss. Only kept where the server may log content."""

    detail: str
    before: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a prefix ended where it did. Without `excerpts` it holds no text of a context.

    Attributes:
        cause: name of the known pattern, or `no_state`: nothing was left to reuse.
        summary, remedy: what happened, and what to do about it.
        message: index of the message in the new version; None behind all of them.
        role: its role.
        field: where in it, if known.
        prefix: tokens that both versions begin with.
        lost: tokens behind them, which an exact prefix cache computes.
        later: causes behind the first one.
        excerpts: what the texts say.
    """

    cause: str
    summary: str
    remedy: str
    message: int | None
    role: str | None
    field: str | None
    prefix: int
    lost: int
    later: tuple[str, ...]
    excerpts: Excerpts | None

    def without_excerpts(self) -> Miss:
        """The same, without texts of the context."""
        return replace(self, excerpts=None)


def may_have_missed(answered: AnsweredCall) -> bool:
    """Whether an answer is worth explaining. Cheap, and says yes rather too often."""
    report, plan = answered.report, answered.plan
    if report.resumed_from == answered.version.id or not answered.version.parents:
        return False
    if report.resumed_from is None:
        return True
    return int(plan.suffix.sum()) > SHORTEST_LOSS or any(
        str(edit.kind) != "append" for edit in answered.edits
    )


def examine(answered: AnsweredCall, renderer: Renderer, *, log_content: bool) -> Miss | None:
    """Explain why the prefix of an answered version ended; None if nothing was lost.

    Args:
        answered: the answer.
        renderer: renders versions for the model.
        log_content: keep excerpts of what the texts say.
    """
    version = answered.version
    from_id = answered.report.resumed_from
    parent = version.parents[0]
    try:
        old = answered.history.get(from_id or parent)
    except PatchKVError:  # state that was taken over from another thread's version
        old = answered.history.get(parent)
    edits = version.edits if old.id == parent else None
    found = explain(old, version, renderer, edits=edits)
    # Nothing of what is to be forgotten may be kept here either.
    forgetful = any(edit.forget for edit in version.edits)
    gone = from_id is None and found.prefix > 0 and not forgetful
    if found.finding.cause is Cause.NOTHING_LOST and not gone:
        return None
    at = found.message_new
    return Miss(
        cause="no_state" if gone else str(found.finding.cause),
        summary=_NO_STATE if gone else found.finding.cause.summary,
        remedy=_NO_STATE_REMEDY if gone else found.finding.cause.remedy,
        message=at,
        role=None if at is None else version.messages[at].role[:_LONGEST_ROLE],
        field=None if gone else found.finding.field,
        prefix=found.prefix,
        lost=found.tokens_new if gone else found.lost,
        later=tuple(dict.fromkeys(str(later.cause) for later in found.later))[:MAX_LATER],
        excerpts=_excerpts(found) if log_content and not forgetful else None,
    )


def _excerpts(found: Explanation) -> Excerpts:
    return Excerpts(found.finding.detail, found.text_before, found.text_old, found.text_new)
