"""Diagnosis of edits: finds the cause of each edit from the two versions alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from patchkv_agents.context.changes.inference import Context
from patchkv_agents.context.changes.values import json_value
from patchkv_agents.context.edits import Edit, EditKind
from patchkv_agents.context.excerpts import changed_span, quoted
from patchkv_agents.context.explaining.causes import Cause
from patchkv_agents.context.explaining.fields import (
    LONGEST_PLACEHOLDER,
    FieldChange,
    changed_fields,
    is_trimmed,
    other_form,
)
from patchkv_agents.context.explaining.volatile import skeleton, volatile_change
from patchkv_agents.context.frozen import FrozenJson
from patchkv_agents.context.messages import Message

_SYSTEM_ROLES = ("system", "developer")
_TOOL_ROLES = ("tool", "function")
_APPENDED = (EditKind.APPEND, EditKind.REFRESH_EVIDENCE, EditKind.REVISE_PLAN)
_PLACEHOLDER = re.compile(
    r"^[\[(<{].*[\])>}]$|\b(clear|remov|omit|elided|truncat|prun|compact|evict|dropped|expired)",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The cause of an edit.

    Attributes:
        cause: the known pattern.
        detail: what was observed, on one line; holds excerpts of the context.
        edit: the edit; None where no edit made the difference (the template did).
        field: where in the message, such as `content` or `tool_calls[0].arguments`, if known.
    """

    cause: Cause
    detail: str
    edit: Edit | None = None
    field: str | None = None


def diagnose(old: Context, new: Context, edits: Sequence[Edit]) -> list[Finding]:
    """The cause of each edit from `old` to `new`, in order."""
    diagnosis = _Diagnosis(old, new, edits)
    return [diagnosis.finding(edit) for edit in edits]


class _Diagnosis:
    """The diagnosis of one pair of versions."""

    def __init__(self, old: Context, new: Context, edits: Sequence[Edit]) -> None:
        self._old, self._new = old, new
        touched = [edit for edit in edits if edit.scope == "messages"]
        self._touched_old = {i for edit in touched for i in edit.old_indices}
        touched_new = {j for edit in touched for j in edit.new_indices}
        kept = (j + 1 for j in range(len(new.messages)) if j not in touched_new)
        self._kept_stop = max(kept, default=0)
        moves = [
            edit
            for edit in touched
            if edit.kind is EditKind.MOVE and edit.old_indices and edit.new_indices
        ]
        self._moved_from = {i: edit for edit in moves for i in edit.old_indices}
        self._moved_to = {j: edit for edit in moves for j in edit.new_indices}
        self._trimmed = self._front(
            sorted(i for edit in touched if not edit.new_indices for i in edit.old_indices)
        )
        results = (m.text.strip() for m in new.messages if m.role in _TOOL_ROLES)
        self._placeholders = Counter(
            skeleton(text) for text in results if len(text) <= LONGEST_PLACEHOLDER
        )

    def _front(self, gone: Sequence[int]) -> frozenset[int]:
        """The messages that a sliding window dropped, if that explains those that are `gone`.

        A window may keep a head: system messages, the first request, a note of what was dropped.
        """
        roles = [message.role for message in self._old.messages]
        head = next((i for i, role in enumerate(roles) if role not in _SYSTEM_ROLES), len(roles))
        if not gone or gone[-1] - gone[0] + 1 != len(gone) or gone[-1] == len(roles) - 1:
            return frozenset()
        noted = gone[0] - 1 in self._touched_old
        return frozenset(gone if head <= gone[0] and (gone[0] <= head + 1 or noted) else ())

    def finding(self, edit: Edit) -> Finding:
        """The cause of one edit."""
        if edit.scope == "tools":
            return Finding(*_tools(self._old.tools, self._new.tools), edit, "tools")
        if edit.scope == "template_args":
            return Finding(Cause.TEMPLATE_ARGS_CHANGED, _template_args(self._old, self._new), edit)
        olds, news = edit.old_indices, edit.new_indices
        if not olds and not news:
            return Finding(Cause.NOTHING_LOST, "declared, but nothing answers to it", edit)
        # Declared kinds are the caller's words: what the edit is depends on what it touches.
        if edit.kind in _APPENDED and not olds and news[0] >= self._kept_stop:
            return Finding(Cause.NOTHING_LOST, "appended", edit)
        if edit.kind is EditKind.MOVE and olds and news:
            return Finding(Cause.TEXT_MOVED, self._what_moved(edit), edit)
        if len(olds) == len(news) == 1:
            return self._in_place(edit, self._old.messages[olds[0]], self._new.messages[news[0]])
        if edit.kind is EditKind.REDACT:
            return Finding(Cause.REDACTED, "whole messages", edit)
        if not news:
            return self._deleted(edit)
        if not olds:
            message = self._new.messages[news[0]]
            in_head = message.role in _SYSTEM_ROLES and news[0] == 0
            cause = Cause.SYSTEM_REWRITTEN if in_head else Cause.INSERTED
            return Finding(cause, f"{quoted(message.text)} is new before older text", edit)
        return Finding(Cause.SUMMARIZED, f"{len(olds)} messages became {len(news)}", edit)

    def _deleted(self, edit: Edit) -> Finding:
        message = self._old.messages[edit.old_indices[0]]
        if self._trimmed.issuperset(edit.old_indices):
            last = max(self._trimmed)
            detail = f"messages {min(self._trimmed)} to {last} are gone, those behind them stay"
            return Finding(Cause.FRONT_TRIMMED, detail, edit)
        in_head = message.role in _SYSTEM_ROLES and edit.old_indices[0] == 0
        cause = Cause.SYSTEM_REWRITTEN if in_head else Cause.DELETED
        return Finding(cause, f"{quoted(message.text)} is gone", edit)

    def _what_moved(self, move: Edit) -> str:
        i, j = move.old_indices[0], move.new_indices[0]
        old, new = self._old.messages[i].text, self._new.messages[j].text
        if not move.partial:
            return f"old message {i} is new message {j}: {quoted(old)}"
        blocks = (block.strip() for block in re.split(r"\n\s*\n", old))
        block = max((block for block in blocks if block in new), key=len, default="")
        return f"a part of old message {i} is in new message {j}: {quoted(block or new)}"

    def _in_place(self, edit: Edit, old: Message, new: Message) -> Finding:
        changes = changed_fields(old, new)
        if not changes:
            return Finding(Cause.RESERIALIZED, "fields or parts in another form", edit)
        change = changes[0]
        start, old_stop, new_stop = changed_span(change.old, change.new)
        pieces = quoted(change.old[start:old_stop]), quoted(change.new[start:new_stop])
        detail = f"{pieces[0]} became {pieces[1]}"

        def finding_of(cause: Cause, what: str = detail) -> Finding:
            return Finding(cause, what, edit, change.field)

        if edit.kind is EditKind.REDACT:
            # No excerpt: this must not be another place where the text is shown.
            return finding_of(Cause.REDACTED, "a piece of it was masked or cut out")
        if move := self._moved_from.get(edit.old_indices[0]) or self._moved_to.get(
            edit.new_indices[0]
        ):
            return finding_of(Cause.TEXT_MOVED, self._what_moved(move))
        volatile = [volatile_change(c.old, c.new) for c in changes]
        if (first := volatile[0]) and all(volatile) and old.role not in (*_TOOL_ROLES, "assistant"):
            what = f"{first.what}: '{first.old}' became '{first.new}'"
            if edit.old_indices[0] + 1 in self._trimmed:
                gone = f"the {len(self._trimmed)} messages behind it are gone"
                return finding_of(Cause.FRONT_TRIMMED, f"{what}, and {gone}")
            return finding_of(Cause.VOLATILE_TEXT, what)
        if edit.kind is EditKind.DROP_REASONING:
            return finding_of(Cause.REASONING_DROPPED, "its text and calls stayed")
        if all(forms := [other_form(c.old, c.new) for c in changes]):
            return finding_of(Cause.RESERIALIZED, f"{forms[0]}: {detail}")
        if old.role in _SYSTEM_ROLES:
            return finding_of(Cause.SYSTEM_REWRITTEN)
        if edit.kind is EditKind.SUMMARIZE:
            return finding_of(Cause.SUMMARIZED)
        sizes = f"{len(change.old):,} characters became {len(change.new):,}"
        if old.role in _TOOL_ROLES and self._is_cleared(change):
            return finding_of(
                Cause.RESULTS_CLEARED, f"{len(change.old):,} characters became {pieces[1]}"
            )
        if edit.kind is EditKind.DELETE or is_trimmed(change):
            return finding_of(Cause.TRUNCATED, f"{sizes}: {detail}")
        if old.role in _TOOL_ROLES:
            only = "; only times and numbers differ" if all(volatile) else ""
            return finding_of(Cause.RESULT_REPLACED, detail + only)
        if edit.kind is EditKind.INSERT:
            return finding_of(Cause.INSERTED)
        return finding_of(Cause.CHANGED)

    def _is_cleared(self, change: FieldChange) -> bool:
        """Whether a placeholder replaced a result."""
        text = change.new.strip()
        if change.field != "content" or len(text) > min(LONGEST_PLACEHOLDER, len(change.old) // 2):
            return False
        if json_value(text) is not None:
            return False  # an empty result is one
        return not text or bool(_PLACEHOLDER.search(text)) or self._placeholders[skeleton(text)] > 1


def _tools(old: Sequence[FrozenJson], new: Sequence[FrozenJson]) -> tuple[Cause, str]:
    before = {tool_name(tool): tool for tool in old}
    after = {tool_name(tool): tool for tool in new}
    if sorted(tool.text for tool in old) == sorted(tool.text for tool in new):
        place = next((n for n, (a, b) in enumerate(zip(old, new, strict=True)) if a != b), 0)
        names = tool_name(old[place]), tool_name(new[place])
        return (
            Cause.TOOLS_REORDERED,
            f"the same {len(old)} tools; at place {place} was {names[0]}, now {names[1]}",
        )
    lists = {
        "new": [name for name in after if name not in before],
        "gone": [name for name in before if name not in after],
        "changed": [n for n, tool in after.items() if n in before and before[n] != tool],
    }
    detail = "; ".join(f"{what}: {', '.join(names)}" for what, names in lists.items() if names)
    if lists["new"] or lists["gone"]:
        return Cause.TOOLS_CHANGED, detail
    pairs = [(before[name].load(), after[name].load()) for name in lists["changed"]]
    if pairs and all(a == b for a, b in pairs):
        return Cause.TOOLS_RESERIALIZED, f"other key order in {', '.join(lists['changed'])}"
    texts = [(before[name].text, after[name].text) for name in lists["changed"]]
    changes = [volatile_change(a, b) for a, b in texts]
    if (first := next(iter(changes), None)) and all(changes):
        name = lists["changed"][0]
        what = f"{first.what} in the tool {name}: '{first.old}' became '{first.new}'"
        return Cause.VOLATILE_TEXT, what
    return Cause.TOOLS_CHANGED, detail or "a tool is there more often or less often"


def tool_name(tool: FrozenJson) -> str:
    """The name in a tool schema, with or without OpenAI's wrapper."""
    schema = tool.load()
    function = schema.get("function")
    named = function if isinstance(function, dict) else schema
    return str(named.get("name", "a tool without a name"))


def _template_args(old: Context, new: Context) -> str:
    before, after = (
        context.template_args.load() if hasattr(context, "template_args") else {}
        for context in (old, new)
    )
    changed = [
        f"{key}: {json.dumps(before.get(key))} became {json.dumps(after.get(key))}"
        for key in {**before, **after}
        if before.get(key) != after.get(key) or (key in before) != (key in after)
    ]
    return "; ".join(changed) or "in another order"
