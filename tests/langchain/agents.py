"""Scripted chat models and tools for agents under test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from langchain.tools import tool
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage

from patchkv_agents import ContextHistory, RecoveryPolicy
from patchkv_agents.recovery import Window

SHORT = RecoveryPolicy("short", Window(8, tail_tokens=4, block_size=8))
"""Restores most of contexts as short as those of the tests."""

OPENING_HOURS = "The museum is open from nine to five, and closed on Mondays. " * 10


class ScriptedModel(GenericFakeChatModel):
    """Says what it is told to; takes tools and leaves them alone."""

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> ScriptedModel:
        return self


def saying(messages: Iterable[BaseMessage | str]) -> ScriptedModel:
    return ScriptedModel(messages=iter(messages))


def looking(times: int, *, then: str = "done") -> Iterable[BaseMessage]:
    """Calls `look` so many times, and says `then` ever after."""
    for number in range(times):
        call = {"id": f"call_{number}", "name": "look", "args": {"place": f"room {number}"}}
        yield AIMessage("", tool_calls=[call])
    while True:
        yield AIMessage(then)


@tool
def look(place: str) -> str:
    """Look at a place."""
    return f"{place}: {OPENING_HOURS}"


def middle_edits(history: ContextHistory) -> list[tuple[Any, ...]]:
    """Kind, author and place of all edits in the order made, appended messages left out."""
    return [
        (edit.kind.value, edit.author, edit.where)
        for version in reversed(history.log())
        for edit in version.edits
        if edit.kind != "append"
    ]
