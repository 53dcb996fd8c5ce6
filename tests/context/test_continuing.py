"""Which version a context goes on from, as its messages tell."""

from __future__ import annotations

from typing import Any

import pytest

from patchkv_agents.context import Message, parse_messages
from patchkv_agents.context.lineage.continuation import continued, message_hashes


def context(text: str) -> tuple[Message, ...]:
    """Messages such as `s u1 a1`: the first letter is the role, `t2:id` has an id."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    said: list[dict[str, Any]] = []
    for word in text.split():
        content, _, name = word.partition(":")
        made = {"role": roles[word[0]], "content": content}
        said.append(made | ({"tool_call_id": name} if name else {}))
    return parse_messages(said)


def found(new: str, head: str, *others: str, led: tuple[str, ...] = ()) -> str | None:
    known = {other: message_hashes(context(other)) for other in (*others, head)}
    return continued(context(new), context(head), known, lambda name: name in led)


@pytest.mark.parametrize(
    ("new", "head", "others", "expected"),
    [
        # Appending, and asking again.
        ("s u1 a1 u2", "s u1", ["s"], None),
        ("s u1", "s u1", ["s"], None),
        # Going back: to a turn, to an answer of it, to a shorter one of several.
        ("s u1", "s u1 a1 u2", ["s u1"], "s u1"),
        ("s u1 a9 u9", "s u1 a1 u2", ["s u1"], "s u1"),
        ("s u1 a1 u9", "s u1 a1 u2 a2 u3", ["s u1", "s u1 a1 u2"], "s u1"),
        ("s u1 a1 u2 a9", "s u1 a1 u2 a2 u3", ["s u1", "s u1 a1 u2"], "s u1 a1 u2"),
        # To another branch, also where the last version is how it begins.
        ("s u1 a1 u2 a2", "s u1 a9 u9", ["s u1", "s u1 a1 u2"], "s u1 a1 u2"),
        ("s u1 a1 u2 a2", "s u1", ["s u1 a1 u2"], "s u1 a1 u2"),
        # Edits: the last message, one in the middle, a summary, a shorter list.
        ("s u1 a1 u9", "s u1 a1 u2", ["s u1"], None),
        ("s u1 a1 t9 a2 u3", "s u1 a1 t2 a2 u3", ["s u1"], None),
        ("s u1 a1 t9:x t8:y", "s u1 a1 t2:x t3:y", ["s u1"], None),
        ("s u1 u9", "s u1 a1 u2 a2 u3", ["s u1"], None),
        ("s u1 a9 u3 a3", "s u1 a1 u2 a2 u3", ["s u1"], None),
        ("u3 a3 u4", "s u1 a1 u2 a2 u3", ["s u1"], None),
    ],
)
def test_what_a_context_goes_on_from(
    new: str, head: str, others: list[str], expected: str | None
) -> None:
    assert found(new, head, *others) == expected


def test_undoing_an_edit_is_an_edit() -> None:
    assert found("s t1 u2 a2", "s t9 u2", "s t1 u2") == "s t1 u2"
    assert found("s t1 u2 a2", "s t9 u2", "s t1 u2", led=("s t1 u2",)) is None


def test_the_newest_of_equal_ones_is_taken() -> None:
    old = message_hashes(context("s u1"))
    asked = continued(
        context("s u1 a9"), context("s u1 a1 u2"), {"1": old, "2": old}, lambda name: False
    )
    assert asked == "2"
