"""Explains where and why the common prefix of two versions ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from patchkv_agents.context.changes.inference import infer_edits
from patchkv_agents.context.edits import Edit
from patchkv_agents.context.explaining.causes import Cause
from patchkv_agents.context.explaining.diagnosis import Finding, diagnose
from patchkv_agents.context.messages import Conversation
from patchkv_agents.context.rendering.render import RenderedContext
from patchkv_agents.context.texts import common_prefix
from patchkv_agents.context.versions import ContextVersion

Renderer = Callable[[ContextVersion], RenderedContext]
"""Renders a version for one model, with the generation prompt."""

# Several edits make one event, and the finding about each tells the whole of it.
_SHOWN_ONCE = (Cause.TEXT_MOVED, Cause.FRONT_TRIMMED)
_AROUND = 48  # characters shown before the first difference, and behind it


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where the common prefix of two versions ends, and why.

    Attributes:
        tokens_old: tokens of the old version.
        tokens_new: tokens of the new one.
        prefix: tokens before the first difference.
        finding: what made the first difference.
        message_old: message of the old version at the first difference, or the next one; None if
            it is behind all messages.
        message_new: the same of the new version.
        token_old: id of the first differing token; None if the old version ends before it.
        token_new: the same of the new version.
        text_before: the end of what both versions share.
        text_old: the old text behind it; empty if it was redacted.
        text_new: the new text behind it.
        later: what else changed; it would end the prefix if the first cause did not.
        verified: whether the places of the messages in the tokens are certain.
        omitted: message index and field of what the template does not show of the new version.
        notes: what the template was shown in another form than the new version has, in words.
    """

    tokens_old: int
    tokens_new: int
    prefix: int
    finding: Finding
    message_old: int | None
    message_new: int | None
    token_old: int | None
    token_new: int | None
    text_before: str
    text_old: str
    text_new: str
    later: tuple[Finding, ...]
    verified: bool
    omitted: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def lost(self) -> int:
        """Tokens of the new version which an exact prefix cache must compute."""
        return self.tokens_new - self.prefix


def explain(
    old: ContextVersion | Conversation,
    new: ContextVersion | Conversation,
    renderer: Renderer,
    *,
    edits: Sequence[Edit] | None = None,
) -> Explanation:
    """Explain where and why the common prefix of two versions ends.

    The place is found in the rendered tokens. To tell whether tools, template arguments, a message
    or the template itself made the difference, versions are rendered with some of them unchanged.

    Args:
        old: the version whose state is there.
        new: the version that is wanted.
        renderer: renders versions, for one model.
        edits: the edits between the two, if known; inferred if left out.
    """
    before, after = _as_version(old), _as_version(new)
    if edits is None:
        edits = infer_edits(before, after)
    return _Comparison(before, after, renderer, diagnose(before, after, edits)).explain()


class _Comparison:
    """Two versions, rendered, and what is behind their edits."""

    def __init__(
        self,
        old: ContextVersion,
        new: ContextVersion,
        renderer: Renderer,
        findings: Sequence[Finding],
    ) -> None:
        self._old, self._new, self._renderer = old, new, renderer
        self._findings = [f for f in findings if f.cause is not Cause.NOTHING_LOST]
        self._a, self._b = renderer(old), renderer(new)
        self._prefix = _common(self._a, self._b)

    def explain(self) -> Explanation:
        a, b, prefix = self._a, self._b, self._prefix
        at_old, at_new = _message_at(a, prefix), _message_at(b, prefix)
        first = self._first(at_old, at_new)
        start = common_prefix(a.text, b.text)
        return Explanation(
            tokens_old=len(a),
            tokens_new=len(b),
            prefix=prefix,
            finding=first,
            message_old=at_old,
            message_new=at_new,
            token_old=int(a.token_ids[prefix]) if prefix < len(a) else None,
            token_new=int(b.token_ids[prefix]) if prefix < len(b) else None,
            text_before=a.text[max(0, start - _AROUND) : start],
            # Text that was redacted is not to be shown once more.
            text_old="" if first.cause is Cause.REDACTED else a.text[start : start + _AROUND],
            text_new=b.text[start : start + _AROUND],
            later=self._later(first),
            verified=a.verified and b.verified,
            omitted=b.omitted,
            notes=b.notes,
        )

    def _later(self, first: Finding) -> tuple[Finding, ...]:
        """The other findings, without repetitions of the same event."""
        if first.cause is Cause.NOTHING_LOST:
            return ()
        shown = {(first.cause, first.detail)} if first.cause in _SHOWN_ONCE else set()
        return tuple(
            f for f in self._findings if f is not first and (f.cause, f.detail) not in shown
        )

    def _first(self, at_old: int | None, at_new: int | None) -> Finding:
        """The finding about the first difference."""
        if self._prefix >= _end(self._a):
            return Finding(Cause.NOTHING_LOST, "the new version goes on where the old one ended")
        if self._prefix >= _end(self._b):
            return Finding(Cause.NOTHING_LOST, "the new version is the beginning of the old one")
        if head := self._head():
            return head
        for finding in self._findings:
            edit = finding.edit
            if edit and (at_old in edit.old_indices or at_new in edit.new_indices):
                return finding
        return self._template(at_old, at_new)

    def _head(self) -> Finding | None:
        """The finding about tools or template arguments, if without it the prefix is longer."""
        heads = {f.edit.scope: f for f in self._findings if f.edit and f.edit.scope != "messages"}
        if not heads:
            return None
        with_old = replace(self._new, tools=self._old.tools, template_args=self._old.template_args)
        if self._common_with_old(with_old) <= self._prefix:
            return None
        with_old_args = replace(self._new, template_args=self._old.template_args)
        if "tools" not in heads or (
            "template_args" in heads and self._common_with_old(with_old_args) > self._prefix
        ):
            return heads["template_args"]
        return heads["tools"]

    def _common_with_old(self, version: ContextVersion) -> int:
        return _common(self._a, self._renderer(version))

    def _template(self, at_old: int | None, at_new: int | None) -> Finding:
        """What the template did: no edit touches the message in which the prefix ends."""
        if _shows_reasoning(self._a, at_old) and not _shows_reasoning(self._b, at_new):
            detail = f"message {at_old} is the same, its reasoning is not shown any more"
            return Finding(Cause.TEMPLATE_DROPS_REASONING, detail, field="reasoning")
        if self._new.tools and at_old is not None:
            a, b = (
                self._renderer(replace(version, tools=())) for version in (self._old, self._new)
            )
            if _common(a, b) >= a.message_spans[at_old][1]:
                detail = f"without tools, message {at_old} is shown as before"
                return Finding(Cause.TEMPLATE_MOVES_TOOLS, detail)
        return Finding(Cause.TEMPLATE_REWRITES, "no edit touches the place of the difference")


def _as_version(context: ContextVersion | Conversation) -> ContextVersion:
    if isinstance(context, ContextVersion):
        return context
    return ContextVersion("", context.messages, context.tools)


def _common(a: RenderedContext, b: RenderedContext) -> int:
    """Length of the common prefix, in tokens."""
    shorter = min(len(a), len(b))
    differing = np.flatnonzero(a.token_ids[:shorter] != b.token_ids[:shorter])
    return int(differing[0]) if len(differing) else shorter


def _end(context: RenderedContext) -> int:
    """Token at which the messages end and the generation prompt begins."""
    return max((stop for _, stop in context.message_spans), default=0) or len(context)


def _message_at(context: RenderedContext, token: int) -> int | None:
    """The message that contains the token, else the first message after it."""
    spans = context.message_spans
    behind = [(start, index) for index, (start, stop) in enumerate(spans) if token < stop > start]
    return min(behind)[1] if behind else None


def _shows_reasoning(context: RenderedContext, message: int | None) -> bool:
    return any(part.message == message and part.field == "reasoning" for part in context.part_spans)
