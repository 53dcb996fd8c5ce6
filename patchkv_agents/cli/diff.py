"""`patchkv diff`: what changed between two versions of a context, in messages and in tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchkv_agents.cli.options import AsJson
from patchkv_agents.cli.tokens import ModelOption, ModelTokens, load_tokens
from patchkv_agents.console import naming, new_console

if TYPE_CHECKING:
    from patchkv_agents.alignment import Alignment
    from patchkv_agents.context import Edit


def diff(
    old: Annotated[Path, typer.Argument(help="The conversation before the edit (JSON).")],
    new: Annotated[Path, typer.Argument(help="The conversation after the edit (JSON).")],
    model: ModelOption = "smollm2",
    min_run: Annotated[
        int, typer.Option(min=1, help="Shorter matches inside changed text do not count.")
    ] = 16,
    as_json: AsJson = False,
) -> None:
    """Show what changed between two versions of a context, and what can be recovered.

    OLD and NEW are files with {"messages": [...], "tools": [...]} in OpenAI form, or with a list
    of messages. Both are rendered with the generation prompt, as for a call of the model.
    """
    from patchkv_agents.alignment import align
    from patchkv_agents.cli.diff_view import message_rows, show
    from patchkv_agents.context import ContextVersion, infer_edits, load_conversation
    from patchkv_agents.context.changes.anchors import message_anchors
    from patchkv_agents.context.changes.matching import match_messages

    before, after = load_conversation(old), load_conversation(new)
    tokens = load_tokens(model)
    with naming(old):
        a = tokens.render(ContextVersion("", before.messages, before.tools))
    with naming(new):
        b = tokens.render(ContextVersion("", after.messages, after.tools))
    matching = match_messages(before.messages, after.messages)
    anchors = message_anchors(a.message_spans, b.message_spans, matching)
    alignment = align(a.token_ids, b.token_ids, min_run=min_run, anchors=anchors)
    edits = infer_edits(before, after)
    verified = a.verified and b.verified
    if as_json:
        typer.echo(json.dumps(document(alignment, edits, tokens, verified=verified)))
        return
    rows = message_rows(before.messages, after.messages, a, b, alignment, matching)
    show(new_console(), rows, (a, b), alignment, edits, tokens)
    for path, context in ((old, a), (new, b)):
        if not context.verified and tokens.counting is None:
            typer.echo(
                f"Message spans are not certain, recovery would be exact: {path}: {context.reason}",
                err=True,
            )


def document(
    alignment: Alignment, edits: Sequence[Edit], tokens: ModelTokens, *, verified: bool
) -> dict[str, Any]:
    """The JSON document: ranges are half-open, in tokens.

    An edit has one row; `old_index` and `new_index` are its first old and new message, null where
    there is none (an edit of the tool list has neither). For hosted models it also says whether
    tokens are estimated, and how they are counted.
    """
    result = {
        **alignment.to_dict(),
        "edits": [
            {
                "kind": edit.kind.value,
                "old_index": edit.old_index,
                "new_index": edit.new_index,
                "declared": edit.declared,
                "partial": edit.partial,
            }
            for edit in edits
        ],
        "verified": verified,
    }
    if tokens.counting is not None:
        result.update(estimate=tokens.estimate, counting=tokens.counting)
    return result
