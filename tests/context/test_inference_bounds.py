"""The work of finding what changed: long contexts, huge results, thousands of messages."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from patchkv_agents.alignment import align
from patchkv_agents.context import RenderedContext, infer_edits, parse_messages
from patchkv_agents.context.changes.anchors import message_anchors
from patchkv_agents.context.changes.matching import match_messages

from ..operations import count_calls

Tokens = list[list[int]]


def rendered(tokens: Tokens) -> RenderedContext:
    """As if each message had exactly these tokens."""
    stops = np.cumsum([len(message) for message in tokens]).tolist()
    spans = tuple(zip([0, *stops], stops, strict=False))
    ids = np.array([token for message in tokens for token in message], dtype=np.int64)
    return RenderedContext(ids, spans, text="", verified=True, reason=None)


def spoken(tokens: Tokens) -> tuple:
    return parse_messages(
        [{"role": "user", "content": " ".join(map(str, message))} for message in tokens]
    )


@pytest.mark.parametrize("size", [50, 500])
@pytest.mark.parametrize("edit", ["one", "twenty", "summary", "move"])
def test_message_diff_and_alignment_of_100_000_tokens(edit: str, size: int) -> None:
    """Calls go with the messages (at most 130 for each measured), not with the tokens."""
    rng = np.random.default_rng(0)
    old = [(rng.zipf(1.3, size) % 49152).tolist() for _ in range(100_000 // size)]
    new = [list(message) for message in old]
    if edit == "one":
        new[len(new) // 5] = rng.integers(0, 49152, 600).tolist()
    elif edit == "twenty":
        for message in new[5 :: len(new) // 20]:
            message[size // 2 : size // 2 + 20] = [7] * 20
    elif edit == "summary":
        new[10 : len(new) // 2] = [rng.integers(0, 49152, 500).tolist()]
    else:
        new.append(new.pop(10))
    messages, contexts = (spoken(old), spoken(new)), (rendered(old), rendered(new))

    def diff() -> None:
        matching = match_messages(*messages)
        anchors = message_anchors(*(c.message_spans for c in contexts), matching)
        alignment = align(contexts[0].token_ids, contexts[1].token_ids, anchors=anchors)
        kept = sum(len(old[i]) for i, _ in matching.kept)
        assert alignment.aligned_tokens >= kept >= 50_000

    assert count_calls(diff) < 2_000 + 250 * len(old)


def huge_text(seed: int) -> str:
    words = [f"w{k}" for k in range(5_000)]
    chosen = random.Random(seed)
    return "\n".join(" ".join(chosen.choices(words, k=12)) for _ in range(140_000))


@pytest.fixture(scope="module")
def huge() -> str:
    return huge_text(0)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("replace_tool_result", lambda text: text[: len(text) // 3] + "x" + text[len(text) // 2 :]),
        ("replace_tool_result", lambda text: "a" + text[1:-1] + "b"),
        ("replace_tool_result", lambda text: huge_text(1)),
        ("replace_tool_result", lambda text: "[cleared]"),
        ("delete", lambda text: text[: len(text) // 3] + text[len(text) // 2 :]),
        ("reserialize", lambda text: text.replace("\n", "\r\n")),
        ("replace_tool_result", lambda text: text.replace("\n", ",").replace("w7 ", "w8 ")),
    ],
    ids=["middle", "ends", "replaced", "cleared", "cut", "line ends", "one line"],
)
def test_result_of_10_mb(huge: str, kind: str, change: Callable[[str], str]) -> None:
    """At most one call a line, and only where all lines are new."""
    assert len(huge.encode()) > 9_000_000
    old, new = (parse_messages([{"role": "tool", "content": t}]) for t in (huge, change(huge)))
    assert [edit.kind.value for edit in infer_edits(old, new)] == [kind]
    lines = huge.count("\n") if change(huge) == huge_text(1) else 0
    assert count_calls(lambda: infer_edits(old, new)) < 1_000 + 1.1 * lines


def lines(*texts: str) -> tuple:
    return parse_messages([{"role": "user", "content": text} for text in texts])


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            ["a", *["Go on."] * 1000, "b"],
            ["c", *["Go on."] * 990, "d"],
            {"other": 1, "summarize": 1},
        ),
        (
            [f"Step {k}: x y z {k} x y z" for k in range(1000)],
            [f"Step {k}: x y q {k} x y q" for k in range(1000)],
            {"other": 1000},
        ),
        (
            [f"At {k} o'clock the board showed {k * k} trains." for k in range(1000)],
            ["New.", *(f"At {k} o'clock the board named {k} trains." for k in range(1000))],
            {"other": 1000, "insert": 1},
        ),
        (
            [f"a message that moves, number {k}" for k in range(1000)],
            [f"a message that moves, number {k}" for k in reversed(range(1000))],
            {"move": 999},
        ),
        (
            [f"{k} an old text without any word of another" for k in range(1000)],
            [f"{k * 17} new" for k in range(900)],
            {"delete": 1000, "append": 900},
        ),
        (
            [f"m{k} " + "text of this message, which is long " * 30 for k in range(1000)],
            [f"m{k} " + "text of this message " for k in range(1000)],
            {"delete": 1000},  # in part
        ),
    ],
    ids=["identical", "all changed", "shifted", "reversed", "rewritten", "all cut"],
)
def test_thousands_of_messages(old: list[str], new: list[str], expected: dict[str, int]) -> None:
    """Calls go with the messages: 12 to 480 for each were measured."""
    before, after = lines(*old), lines(*new)
    found = Counter(edit.kind.value for edit in infer_edits(before, after))
    assert found == expected
    assert count_calls(lambda: infer_edits(before, after)) < 700 * len(old)
