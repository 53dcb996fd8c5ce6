"""Messages for tests: given ones, and hypothesis strategies for random ones."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

# Without lone surrogates, which are an error, and without what SmolLM2 has no tokens for: control
# codes and planes 4 to 13. These are tested on their own.
characters = st.characters(exclude_categories=("Cs", "Cc"), max_codepoint=0x3FFFF)
texts = st.text(characters | st.sampled_from("\n\t "), max_size=40)
names = st.text("abcdefgh_", min_size=1, max_size=8)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
argument_objects = st.dictionaries(texts, json_values, max_size=3)
calls = st.builds(
    lambda name, arguments, call_id, flat: (
        {"id": call_id, "name": name, "args": arguments}
        if flat
        else {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
    ),
    names,
    argument_objects | texts | argument_objects.map(json.dumps),
    names,
    st.booleans(),
)
contents = texts | st.lists(
    texts.map(lambda text: {"type": "text", "text": text})
    | json_values.map(lambda value: {"type": "image_url", "image_url": value}),
    max_size=3,
)


def _message(role: str, content: Any, optional: dict[str, Any], more: dict[str, Any]) -> dict:
    if role != "assistant":
        optional = {key: value for key, value in optional.items() if key != "tool_calls"}
        content = "" if content is None else content
    return {"role": role, "content": content, **optional, **{f"x-{k}": more[k] for k in more}}


messages = st.builds(
    _message,
    st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
    contents | st.none(),
    st.fixed_dictionaries(
        {},
        optional={
            "name": names,
            "tool_call_id": names,
            "reasoning": texts,
            "tool_calls": st.lists(calls, min_size=1, max_size=3),
        },
    ),
    st.dictionaries(names, json_values, max_size=2),
)
message_lists = st.lists(messages, max_size=6)


def agent_messages() -> list[dict[str, Any]]:
    """A short episode: two calls with results, one of them raw, reasoning, unusual borders."""
    return [
        {"role": "system", "content": "You look things up.\n", "id": "m0"},
        {"role": "user", "content": "  When does the 9:40 leave?", "id": "m1"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "The board knows.",
            "id": "m2",
            "tool_calls": [{"id": "c1", "name": "board", "args": {"stop": "Quay", "at": [9, 40]}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"track": 4}', "id": "m3"},
        {
            "role": "assistant",
            "content": "And the map?",
            "id": "m4",
            "tool_calls": [
                {
                    "id": "c2",
                    "type": "function",
                    "function": {"name": "map", "arguments": '{"zoom":  2}'},
                }
            ],
        },
        {
            "role": "tool",
            "tool_call_id": "c2",
            "content": "Track 4 is behind the kiosk.",
            "id": "m5",
        },
        {"role": "assistant", "content": "Track 4, behind the kiosk.", "id": "m6"},
        {"role": "user", "content": "Thanks! And the 10:10?", "id": "m7"},
    ]
