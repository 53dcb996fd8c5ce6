"""Alignment of real text: random edit scripts, with and without anchors, and the shared edits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkv_agents.alignment import Alignment, Anchor, align
from patchkv_agents.context import Conversation, RenderedContext, parse_messages, parse_tools
from patchkv_agents.context import render as render_context
from patchkv_agents.context.changes.anchors import message_anchors
from patchkv_agents.context.changes.matching import match_messages

from .reference import Ints, assert_holds, best_cover

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Steps = list[tuple[str, Conversation, Conversation]]

CASES = "01 03 04 06 08 09 10 12 14 15 18 20 21 22 25 26 30 31 32".split()
FOUR_LETTERS = re.compile(r"\s?\w{1,4}|\s|[^\w\s]")  # as fine as a vocabulary of 50,000


@cache
def text_tokens(path: Path) -> Ints:
    """The contexts of five real questions, one after the other, as numbers of short pieces."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()[:5]]
    numbers: dict[str, int] = {}
    pieces = FOUR_LETTERS.findall("\n".join(json.dumps(row) for row in rows))
    return np.array([numbers.setdefault(piece, len(numbers)) for piece in pieces])


def edited_messages(
    rng: np.random.Generator, text: Ints, edits: int
) -> tuple[Ints, Ints, list[Anchor]]:
    """Text cut into messages, of which some are replaced, changed, deleted, moved, or come again.

    The anchors are the messages that survive; one of ten is wrong.
    """
    at, old = int(rng.integers(0, len(text) - 8_000)), []
    while sum(map(len, old)) < 1_500:
        size = int(rng.choice([5, 20, 80, 300]))
        old.append(text[at : at + size])
        at += size
    new: list[tuple[int, Ints]] = list(enumerate(old))
    for _ in range(edits):
        place, other = (int(k) for k in rng.integers(0, len(new), 2))
        source, message = new[place]
        cut = int(rng.integers(0, len(message) + 1))
        fresh = text[at : at + int(rng.integers(1, 100))]
        at += len(fresh)
        match rng.integers(6):
            case 0:
                new[place] = -1, fresh
            case 1:
                new[place] = -1, np.concatenate([message[:cut], fresh[:9], message[cut + 5 :]])
            case 2 if len(new) > 1:
                del new[place]
            case 3:
                new.insert(other, new.pop(place))
            case 4:
                new.insert(other, (-1, message))
            case _:
                new.insert(place, (-1, fresh))
    old_at = np.cumsum([0, *map(len, old)])
    anchors, start = [], 0
    for source, message in new:
        stop = start + len(message)
        if source >= 0:
            shift = int(rng.random() < 0.1)
            span = int(old_at[source]) + shift, int(old_at[source + 1]) + shift
            anchors.append((span, (start, stop)))
        start = stop
    return np.concatenate(old), np.concatenate([message for _, message in new]), anchors


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_random_edit_scripts(shared_dir: Path, seed: int, edits: int) -> None:
    text = text_tokens(shared_dir / "data" / "hotpotqa.jsonl")
    old, new, anchors = edited_messages(np.random.default_rng(seed), text, edits)
    least = 0.98 * best_cover(old, new, 16, keep_prefix=True)
    for alignment in (align(old, new), align(old, new, anchors=anchors)):
        assert_holds(alignment, old, new, 16)
        assert alignment.aligned_tokens >= least


@pytest.fixture(scope="module")
def render(smollm2_tokenizer: PreTrainedTokenizerBase) -> Callable[..., RenderedContext]:
    return cache(lambda conversation: render_context(conversation, smollm2_tokenizer))


def steps(shared_dir: Path, case: str) -> Steps:
    (path,) = (shared_dir / "edits").glob(f"{case}-*.json")
    document = json.loads(path.read_text("utf-8"))
    tools = parse_tools(document["tools"])
    after = parse_tools(document.get("tools_new", document["tools"]))
    versions = [(document["old"], tools), (document["new"], after)]
    if document.get("next"):
        versions.append((document["next"], after))
    parsed = [Conversation(parse_messages(messages), schemas) for messages, schemas in versions]
    return [(case, old, new) for old, new in zip(parsed, parsed[1:], strict=False)]


def anchored(old: Conversation, new: Conversation, render: Callable) -> Alignment:
    matching = match_messages(old.messages, new.messages)
    before, after = render(old), render(new)
    anchors = message_anchors(before.message_spans, after.message_spans, matching)
    assert len(anchors) == len(matching.kept) + len(matching.moved)
    return align(before.token_ids, after.token_ids, anchors=anchors)


@pytest.mark.parametrize("case", CASES)
def test_shared_edits(shared_dir: Path, render: Callable, case: str) -> None:
    for _, old, new in steps(shared_dir, case):
        before, after = render(old), render(new)
        alignment = anchored(old, new, render)
        assert before.verified and after.verified
        assert_holds(alignment, before.token_ids, after.token_ids, 16)
        best = best_cover(before.token_ids, after.token_ids, 16, keep_prefix=True)
        assert alignment.aligned_tokens >= 0.98 * best
        moved = {"12": 1, "15": 5, "26": 1}.get(case, 0)
        assert len(alignment.moves) == moved


def test_summary_leaves_no_spurious_runs(shared_dir: Path, render: Callable) -> None:
    """Six words of the summary, with the control tokens behind them, are in what it replaces."""
    ((_, old, new),) = steps(shared_dir, "06")
    alignment = anchored(old, new, render)
    assert len(alignment.runs) == 2
    summary = render(new).message_spans[2]
    inside = alignment.position_map()[summary[0] + 3 : summary[1] - 2]
    assert (inside < 0).all()
    assert len(align(render(old).token_ids, render(new).token_ids).runs) == 3


def test_right_copy_is_missing(shared_dir: Path, render: Callable) -> None:
    """Of four equal log blocks the second went, and every other one keeps its own state."""
    ((_, old, new),) = steps(shared_dir, "25")
    alignment = anchored(old, new, render)
    (hunk,) = alignment.hunks
    assert hunk.new_start == hunk.new_stop
    before, after = render(old).message_spans[7], render(new).message_spans[7]
    assert before[0] < hunk.old_start and hunk.old_stop < before[1]
    for i, j in match_messages(old.messages, new.messages).kept:
        old_start, old_stop = render(old).message_spans[i]
        start, stop = render(new).message_spans[j]
        if (i, j) != (7, 7):
            expected = range(old_start, old_stop)
            assert alignment.position_map()[start:stop].tolist() == list(expected)
    assert after[1] - after[0] == before[1] - before[0] - (hunk.old_stop - hunk.old_start)
