"""Values of arguments that models write without quotes, by the schemas of tools."""

from __future__ import annotations

from typing import Any

import pytest

from patchkv_agents.context.answers.arguments import argument_types, typed_value
from patchkv_agents.context.parsing import parse_tools


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "75", "75"),
        ({"type": "string"}, '"75"', '"75"'),
        ({"type": "integer"}, "75", 75),
        ({"type": "number"}, "7.5", 7.5),
        ({"type": "integer"}, "many", "many"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "75", "75"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"allOf": [{"$ref": "#/$defs/City"}]}, "75", "75"),
        ({"$ref": "#/$defs/Box"}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/Loop"}, "1", 1),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "5"}, "5", "5"),
        ({"type": "object"}, "{}", {}),
        ({}, "75", 75),
        ({}, "Bern", "Bern"),
        (True, "[1]", [1]),
    ],
)
def test_the_schema_decides(schema: Any, text: str, value: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"x": schema},
        "$defs": {
            "City": {"type": "string"},
            "Box": {"type": "object"},
            "Loop": {"$ref": "#/$defs/Loop"},
        },
    }
    tools = parse_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    result = typed_value(text, argument_types(tools)["f"]["x"])
    assert result == value and type(result) is type(value)
