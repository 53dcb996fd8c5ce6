"""What counts as the same conversation, and how much of it is left."""

from __future__ import annotations

from typing import Any

import pytest

from patchkv_agents.context import parse_messages, parse_template_args, parse_tools
from patchkv_server.shapes import Shape

from .serving import talk

SYSTEM = "It is 17:41. You help in a shop, and you are brief. "


def shape(messages: list[dict[str, Any]], tools: Any = ()) -> Shape:
    return Shape.of(parse_messages(messages), parse_tools(tools), parse_template_args({}))


LONG = talk("Ann", 10, system=SYSTEM * 5)


@pytest.mark.parametrize(
    "new",
    [
        LONG,
        [*LONG, {"role": "assistant", "content": "All there."}],
        LONG[:3],
        [{**LONG[0], "content": (SYSTEM * 5).replace("17:41", "17:42", 1)}, *LONG[1:]],
        [LONG[0], {"role": "user", "content": "So far: Ann asked for things."}, *LONG[-4:]],
        LONG[7:],
    ],
    ids=["again", "gone on", "back to its beginning", "other minute", "summary", "front trimmed"],
)
def test_the_same_conversation(new: list[dict[str, Any]]) -> None:
    assert shape(new).continues(shape(LONG))


@pytest.mark.parametrize(
    "new",
    [
        talk("Bob", 10, system=SYSTEM * 5),
        [LONG[0]],
        [{"role": "system", "content": "Give a title of three words."}, LONG[1]],
        [{"role": "system", "content": "Summarise."}, *LONG[1:6]],
        [{"role": "user", "content": str(LONG)}],
    ],
    ids=["same system prompt", "nothing else", "title", "summary of a part", "all in one message"],
)
def test_another_conversation(new: list[dict[str, Any]]) -> None:
    assert not shape(new).continues(shape(LONG))


def test_what_is_left() -> None:
    old, edited = shape(LONG), [dict(message) for message in LONG]
    edited[2]["content"] = "Sold."
    new = shape(edited)
    assert old.left_after(old, exact=True) == 0
    behind = new.size - sum(old.sizes[:2]) - len(old.opening)
    assert new.left_after(old, exact=True) == behind
    assert new.sizes[2] < new.left_after(old, exact=False) < behind / 3
    with_tools = shape(LONG, [{"type": "function", "function": {"name": "find"}}])
    assert with_tools.left_after(old, exact=True) == with_tools.size  # it stands before all
    assert with_tools.continues(old)
