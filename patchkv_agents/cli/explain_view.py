"""Output of `patchkv explain`: lines for people, one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from patchkv_agents.alignment import Alignment
from patchkv_agents.cli.edit_view import edit_document, edit_lines, ranges
from patchkv_agents.cli.tokens import ModelTokens
from patchkv_agents.console import plural
from patchkv_agents.context import ContextVersion, Edit
from patchkv_agents.context.excerpts import escaped, one_line
from patchkv_agents.context.explaining.causes import Cause
from patchkv_agents.context.explaining.diagnosis import Finding
from patchkv_agents.context.explaining.explain import Explanation

_LONGEST_LINE = 240


def show(
    console: Console,
    explanation: Explanation,
    alignment: Alignment,
    old: ContextVersion,
    new: ContextVersion,
    tokens: ModelTokens,
) -> None:
    """Print where the prefix ends, why, and what to do about it."""
    about = "about " if tokens.estimate else ""
    console.print(
        f"{one_line(old.id, _LONGEST_LINE)} -> {one_line(new.id, _LONGEST_LINE)}: "
        f"{about}{explanation.tokens_old:,} -> {about}{explanation.tokens_new:,} tokens"
    )
    finding = explanation.finding
    if finding.cause is Cause.NOTHING_LOST:
        console.print(
            f"Nothing was lost: {finding.detail}. Behind the common prefix of "
            f"{plural(explanation.prefix, 'token')}, {explanation.lost:,} are to be computed."
        )
    else:
        console.print(
            f"The exact prefix ends at token {explanation.prefix:,}. "
            f"{plural(explanation.lost, 'token')} behind it must be computed again; "
            f"{alignment.recoverable_tokens:,} of these are the same as before."
        )
        _print_place(console, explanation, old, tokens)
        console.print(Text(f"Cause: {finding.cause.summary} [{finding.cause}]", style="bold"))
        console.print(f"  {one_line(finding.detail, _LONGEST_LINE)}")
        if finding.edit is not None:
            console.print(f"  edit {next(edit_lines([finding.edit]))}")
        console.print(f"What to do: {finding.cause.remedy}")
        _print_later(console, explanation.later)
    hidden = [f"{'tools' if i < 0 else f'message {i} {field}'}" for i, field in explanation.omitted]
    if hidden:
        listed = one_line(", ".join(hidden), _LONGEST_LINE)
        console.print(f"The chat template does not show: {listed}")
    for note in explanation.notes:
        console.print(f"Shown in another form: {note}")
    if tokens.counting is not None:
        console.print(tokens.counting)
    elif not explanation.verified:
        console.print("Where messages are in the tokens is not certain with this chat template.")


def _print_place(
    console: Console, explanation: Explanation, old: ContextVersion, tokens: ModelTokens
) -> None:
    place = "behind the last message"
    if (index := explanation.message_old) is not None:
        place = f"old message {index} ({old.messages[index].role})"
        if explanation.finding.field is not None:
            place += f", {one_line(explanation.finding.field, _LONGEST_LINE)}"
    if explanation.finding.cause is Cause.REDACTED:
        console.print(f"Place: {place}")
        return
    token_old, token_new = (
        "nothing" if token is None else f"'{escaped(tokens.decode(token))}'"
        for token in (explanation.token_old, explanation.token_new)
    )
    console.print(f"Place: {place}; first differing token: {token_old} became {token_new}")
    for sign, text, style in (
        ("-", explanation.text_old, "red"),
        ("+", explanation.text_new, "green"),
    ):
        line = Text(f"  {sign} ")
        line.append(escaped(explanation.text_before), style="dim")
        console.print(line.append(escaped(text), style=style))


def _print_later(console: Console, later: Sequence[Finding]) -> None:
    """The other changes, one line for each cause."""
    causes: dict[Cause, list[Finding]] = {}
    for finding in later:
        causes.setdefault(finding.cause, []).append(finding)
    if causes:
        console.print("Behind it, the prefix would also end because:")
    for cause, findings in causes.items():
        edits = [finding.edit for finding in findings if finding.edit is not None]
        console.print(f"  {cause.summary} [{cause}]: {_places(edits)}")


def _places(edits: Sequence[Edit]) -> str:
    olds = sorted({i for edit in edits for i in edit.old_indices})
    news = sorted({j for edit in edits if not edit.old_indices for j in edit.new_indices})
    scopes = sorted({edit.scope.replace("_", " ") for edit in edits if edit.scope != "messages"})
    named = [
        f"{which} {'message' if len(indices) == 1 else 'messages'} {ranges(indices)}"
        for which, indices in (("old", olds), ("new", news))
        if indices
    ]
    return ", ".join([*named, *scopes])


def document(
    explanation: Explanation,
    alignment: Alignment,
    old: ContextVersion,
    new: ContextVersion,
    tokens: ModelTokens,
) -> dict[str, Any]:
    """The explanation as JSON values; `estimate` and `counting` are those of hosted models."""
    result = {
        "old": old.id,
        "new": new.id,
        "tokens_old": explanation.tokens_old,
        "tokens_new": explanation.tokens_new,
        "prefix": explanation.prefix,
        "lost_tokens": explanation.lost,
        "recoverable_tokens": alignment.recoverable_tokens,
        **_finding_document(explanation.finding),
        "message_old": explanation.message_old,
        "message_new": explanation.message_new,
        "token_old": explanation.token_old,
        "token_new": explanation.token_new,
        "text_before": explanation.text_before,
        "text_old": explanation.text_old,
        "text_new": explanation.text_new,
        "later": [_finding_document(finding) for finding in explanation.later],
        "verified": explanation.verified,
        "omitted": [list(omitted) for omitted in explanation.omitted],
        "notes": list(explanation.notes),
    }
    if tokens.counting is not None:
        result.update(estimate=tokens.estimate, counting=tokens.counting)
    return result


def _finding_document(finding: Finding) -> dict[str, Any]:
    return {
        "cause": finding.cause.value,
        "summary": finding.cause.summary,
        "detail": finding.detail,
        "remedy": finding.cause.remedy,
        "field": finding.field,
        "edit": None if finding.edit is None else edit_document(finding.edit),
    }
