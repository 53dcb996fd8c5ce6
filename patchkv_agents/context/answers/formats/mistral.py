"""Calls of Mistral, which follow `[TOOL_CALLS]` to the end of the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from patchkv_agents.context.answers.arguments import Tools
from patchkv_agents.context.answers.formats.base import (
    MalformedCall,
    call_of,
    find_enclosed,
    load_json,
    make_call,
    next_json,
)
from patchkv_agents.context.messages import ToolCall

_TAG = "[TOOL_CALLS]"
_HEAD = re.compile(
    r"\s*(?:\[TOOL_CALLS\])?\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)"
)


@dataclass(frozen=True, slots=True)
class MistralFormat:
    """A JSON list of calls, or `name[ARGS]{...}` for each, with `[TOOL_CALLS]` between them.

    Attributes:
        named: whether the model's template writes the latter.
    """

    name: str = "mistral"
    markers: tuple[str, ...] = (_TAG, "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
    thinking: tuple[str, str] = ("[THINK]", "[/THINK]")
    lead: str = ""
    id_form: str = "{:.9}"  # the templates refuse ids of another length
    named: bool = False

    def find(
        self, text: str, tools: Tools, *, is_start: bool, is_end: bool
    ) -> tuple[int, int | None]:
        """As `CallFormat.find`."""
        return next(iter(find_enclosed(text, _TAG, None, is_end=is_end)))

    def read(self, block: str, tools: Tools) -> list[ToolCall]:
        """As `CallFormat.read`."""
        text = block.removeprefix(_TAG).strip()
        if text.startswith(("[", "{")):
            value = load_json(text)
            calls = [call_of(item) for item in (value if isinstance(value, list) else [value])]
        else:
            calls, place = [], 0
            while place < len(text):
                head = _HEAD.match(text, place)
                if head is None:
                    raise MalformedCall("a call is its name, [ARGS] and a JSON object")
                arguments, place = next_json(text, head.end())
                calls.append(make_call(head[1], arguments, head[2]))
        if not calls:
            raise MalformedCall(f"nothing follows {_TAG}")
        return calls

    def opening(self, tools: Iterable[str]) -> str:
        """As `CallFormat.opening`."""
        names = list(tools)
        if self.named:
            return f"{_TAG}{names[0]}[ARGS]" if len(names) == 1 else _TAG
        head = f'{_TAG}[{{"name": '
        return f'{head}{json.dumps(names[0])}, "arguments":' if len(names) == 1 else f'{head}"'
