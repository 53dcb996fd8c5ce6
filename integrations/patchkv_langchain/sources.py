"""What the messages themselves record of who changed them.

Each source looks at a message as it is now, and at what was in its place if that is known, and
says whose doing it is. Releases looked at: langchain 1.5, deepagents 0.7, langmem 0.0.30.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkv_agents.context import EditKind
from patchkv_langgraph.marks import mark_of

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

    from patchkv_agents.context import Message
    from patchkv_agents.context.edits import EditPlace

TODO_TOOL = "write_todos"
LANGMEM_SUMMARY = "Summary of the conversation so far: "  # langmem's DEFAULT_FINAL_SUMMARY_PROMPT
_EVICTED = "Tool result too large, the result of this tool call "  # deepagents' large results
_CLIPPED = "[Output was truncated due to context window size limits. The full content is at "
_ARGUMENT_HEAD = 20  # characters of a truncated argument that deepagents leaves
_MARKER_MOST = 200  # characters: what stands for the rest of it


@dataclass(frozen=True, slots=True)
class Claim:
    """What is said about an edit.

    Attributes:
        author: who made it, if known.
        kind: what it was meant to be, if known.
        reason: in a word.
        where: whether the program's state was changed, or the request alone.
        partial: only a part of the message changed.
    """

    author: str | None = None
    kind: EditKind | None = None
    reason: str = ""
    where: EditPlace = "state"
    partial: bool = False


Source = Callable[["BaseMessage", "Message | None"], Claim | None]


def stamped(new: BaseMessage, old: Message | None) -> Claim | None:
    """A mark that a program put on the message (`patchkv_langgraph.marks`)."""
    mark = mark_of(new)
    return None if mark is None else Claim(mark.author, mark.kind, mark.reason or "")


def context_editing(new: BaseMessage, old: Message | None) -> Claim | None:
    """LangChain's `ContextEditingMiddleware`: a cleared tool result, or cleared arguments."""
    record = new.response_metadata.get("context_editing")
    if old is None or not isinstance(record, Mapping):
        return None
    is_result = new.type == "tool"
    if not record.get("cleared" if is_result else "cleared_tool_inputs"):
        return None
    return Claim(
        "ContextEditingMiddleware",
        EditKind.REPLACE_TOOL_RESULT if is_result else EditKind.DELETE,
        str(record.get("strategy") or "clear_tool_inputs"),
        where="request",
        partial=not is_result,
    )


def summarization(new: BaseMessage, old: Message | None) -> Claim | None:
    """The `SummarizationMiddleware` of LangChain and of deepagents: the summary."""
    if new.additional_kwargs.get("lc_source") != "summarization":
        return None
    return Claim("SummarizationMiddleware", EditKind.SUMMARIZE, "summarization")


def langmem_summary(new: BaseMessage, old: Message | None) -> Claim | None:
    """Langmem's `SummarizationNode`: the summary, known by its default prompt only."""
    if new.type != "system" or not new.text.startswith(LANGMEM_SUMMARY):
        return None
    return Claim("SummarizationNode", EditKind.SUMMARIZE, "summarization")


def todo_list(new: BaseMessage, old: Message | None) -> Claim | None:
    """LangChain's `TodoListMiddleware`: the result of its tool is the plan as it is now."""
    if new.type != "tool" or not _is_todo_list(new):
        return None
    return Claim("TodoListMiddleware", EditKind.REVISE_PLAN, TODO_TOOL)


def _is_todo_list(result: BaseMessage) -> bool:
    return result.name == TODO_TOOL or (
        result.name is None and result.text.startswith("Updated todo list to ")
    )


def evicted(new: BaseMessage, old: Message | None) -> Claim | None:
    """Deepagents' middleware: content that went to a file, of which a preview is left."""
    if old is None:
        return None
    if new.type == "human" and new.additional_kwargs.get("lc_evicted_to"):
        # The message keeps the mark in the state, whole: only a change makes it an edit.
        return Claim(
            "FilesystemMiddleware",
            EditKind.DELETE,
            "evicted_to_file",
            where="request",
            partial=True,
        )
    if new.type != "tool":
        return None
    text = new.text
    if text.startswith(_EVICTED) or (_CLIPPED in text and _CLIPPED not in old.text):
        return Claim("SummarizationMiddleware", EditKind.REPLACE_TOOL_RESULT, "evicted_to_file")
    return None


def truncated_arguments(new: BaseMessage, old: Message | None) -> Claim | None:
    """Deepagents' `SummarizationMiddleware`: the beginnings of long arguments, and a marker."""
    if new.type != "ai" or old is None:
        return None
    calls: list[Any] = getattr(new, "tool_calls", [])
    if len(calls) != len(old.tool_calls):
        return None
    changed = [
        (before.parsed_arguments(), call["args"])
        for before, call in zip(old.tool_calls, calls, strict=True)
        if before.parsed_arguments() != call["args"]
    ]
    if not changed or not all(_is_truncated(before, after) for before, after in changed):
        return None
    return Claim(
        "SummarizationMiddleware",
        EditKind.DELETE,
        "truncate_args",
        where="request",
        partial=True,
    )


def _is_truncated(before: Any, after: Mapping[str, Any]) -> bool:
    if not isinstance(before, dict) or before.keys() != after.keys():
        return False
    pairs = [(before[key], after[key]) for key in after if before[key] != after[key]]
    return all(
        isinstance(old, str)
        and isinstance(new, str)
        and len(new) < len(old)
        and len(new) <= _ARGUMENT_HEAD + _MARKER_MOST
        and new[:_ARGUMENT_HEAD] == old[:_ARGUMENT_HEAD]
        for old, new in pairs
    )


SOURCES: tuple[Source, ...] = (
    stamped,
    context_editing,
    summarization,
    langmem_summary,
    todo_list,
    evicted,
    truncated_arguments,
)


def recorded(new: BaseMessage, old: Message | None) -> Claim | None:
    """The first claim that a source makes."""
    return next((claim for source in SOURCES if (claim := source(new, old))), None)
