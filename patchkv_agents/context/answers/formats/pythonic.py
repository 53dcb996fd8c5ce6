"""Calls as Python writes them, `[name(key="value")]`: LFM2, OLMo 3, Llama 3.2 and 4."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from patchkv_agents.context.answers.arguments import Tools
from patchkv_agents.context.answers.formats.base import BlockFormat, MalformedCall, make_call
from patchkv_agents.context.messages import ToolCall

_JSON_NAMES = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class PythonicFormat(BlockFormat):
    """Calls between markers, in a list or one a line, with literal keyword arguments."""

    name: str = "lfm2"
    begin: str = "<|tool_call_start|>"
    end: str = "<|tool_call_end|>"
    is_list: bool = True

    def read(self, block: str, tools: Tools) -> list[ToolCall]:
        """As `CallFormat.read`."""
        return read_calls(self.inside(block))

    def opening(self, tools: Iterable[str]) -> str:
        """As `CallFormat.opening`."""
        names = list(tools)
        head = f"{self.begin}[" if self.is_list else f"{self.begin}\n"
        return f"{head}{names[0]}(" if len(names) == 1 else head


def read_calls(text: str) -> list[ToolCall]:
    """The calls of a list, or of a text with one call a line. Nothing in it is executed.

    Raises:
        MalformedCall: it is something else.
    """
    try:
        statements = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedCall(f"it is not Python: {error}") from None
    calls: list[ToolCall] = []
    for statement in statements:
        value = statement.value if isinstance(statement, ast.Expr) else None
        for item in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
            if not isinstance(item, ast.Call) or item.args:
                raise MalformedCall("a call is a name and keyword arguments")
            name = ast.unparse(item.func)
            calls.append(make_call(name, {word.arg: _literal(word) for word in item.keywords}))
    if not calls:
        raise MalformedCall("there is no call in it")
    return calls


def _literal(word: ast.keyword) -> Any:
    if word.arg is None:
        raise MalformedCall("a call is a name and keyword arguments")
    return _evaluated(word.value)


def _evaluated(node: ast.expr) -> Any:
    """The value of a literal; JSON's constants are understood too."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluated(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            _evaluated(key): _evaluated(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError) as error:
        raise MalformedCall(f"an argument is not a literal: {error}") from None
