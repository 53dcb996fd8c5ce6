"""JSON types of tools' arguments, and values that a model wrote as plain text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from patchkv_agents.context.frozen import FrozenJson

Types = frozenset[str]
"""JSON types that a value may have, by their names in JSON Schema; empty: any."""

Tools = Mapping[str, Mapping[str, Types]]
"""Types of each tool's arguments, by the tool's name."""

_PYTHON = {"True": True, "False": False, "None": None}
"""Constants as Jinja's `string` filter writes them."""


def argument_types(tools: Iterable[FrozenJson]) -> Tools:
    """The types of the arguments of tool schemas, in OpenAI's form or without its envelope."""
    types: dict[str, Mapping[str, Types]] = {}
    for tool in tools:
        value = tool.load()
        function = value.get("function", value)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            root = function.get("parameters", function.get("input_schema"))
            types[function["name"]] = {
                key: frozenset(_types(schema, root, 0)) for key, schema in _properties(root)
            }
    return types


def typed_value(text: str, types: Types) -> Any:
    """The value of an argument written without quotes; text where no other type fits.

    Args:
        text: as the model wrote it.
        types: that the schema allows. Without any, JSON is read as JSON, and the rest is text.
    """
    if types == {"string"}:
        return text
    value: Any
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        value = _PYTHON.get(text.strip(), text)
    if not types or _type_names(value) & types:
        # A quoted text where text is allowed keeps its quotes: the model wrote them.
        return text if types and isinstance(value, str) and "string" in types else value
    return text


def _properties(root: Any) -> Iterator[tuple[str, Any]]:
    """The properties of an object's schema, those of its parts included."""
    if not isinstance(root, dict):
        return
    for part in (root, *(root.get("allOf") or ())):
        if isinstance(part, dict) and isinstance(part.get("properties"), dict):
            yield from part["properties"].items()


def _types(schema: Any, root: Any, depth: int) -> Iterator[str]:
    """The types that a schema names, references followed."""
    if not isinstance(schema, dict) or depth > 16:  # a reference may lead to itself
        return
    declared = schema.get("type")
    yield from [declared] if isinstance(declared, str) else declared or ()
    values = [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else [])]
    if declared is None:
        for value in values:
            yield from _type_names(value)
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key) or ():
            yield from _types(part, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = root
        for step in reference[2:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, dict) else None
        yield from _types(target, root, depth + 1)


def _type_names(value: Any) -> set[str]:
    """Names of the JSON types that a value has."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    return (
        {"string"}
        if isinstance(value, str)
        else ({"array"} if isinstance(value, list) else {"object"})
    )
