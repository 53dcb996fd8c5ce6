"""Which edits are inferred from two versions: kinds of changes, and which message is which."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkv_agents.context import (
    Conversation,
    EditKind,
    infer_edits,
    parse_messages,
    parse_tools,
)
from patchkv_agents.context.changes.matching import match_messages
from patchkv_agents.context.texts import common_ends, text_similarity

from .samples import agent_messages, message_lists, texts

LONG = "The quick brown fox jumps over the lazy dog near the old mill by the river. "


def edits_of(old: list[dict], new: list[dict]) -> list[tuple]:
    found = infer_edits(parse_messages(old), parse_messages(new))
    return [(edit.kind.value, edit.old_indices, edit.new_indices, edit.partial) for edit in found]


def changed(index: int, **fields: Any) -> list[dict]:
    messages = agent_messages()
    messages[index] |= fields
    return messages


def test_equal_lists_have_no_edits_whatever_the_ids() -> None:
    other = agent_messages()
    for message in other:
        message["id"] = "new-" + message["id"]
    assert edits_of(agent_messages(), other) == []


CALL = {"id": "c1", "name": "board"}


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (changed(3, content="none"), ("replace_tool_result", 3, False)),
        (changed(5, content="Track 5 is behind the kiosk."), ("replace_tool_result", 5, True)),
        (changed(5, content="Track 4 is behind kiosk."), ("delete", 5, True)),
        (changed(3, content='{"track":4}\n'), ("reserialize", 3, False)),
        (changed(0, content="You look things up. It is 9:41."), ("rewrite_system", 0, True)),
        (changed(2, reasoning=None), ("drop_reasoning", 2, True)),
        (changed(2, reasoning="Ask the board."), ("other", 2, True)),
        (
            changed(2, tool_calls=[CALL | {"args": {"at": [9, 40], "stop": "Quay"}}]),
            ("reserialize", 2, False),
        ),
        (
            changed(2, tool_calls=[CALL | {"args": '{"stop":"Quay","at":[9,40.0]}'}]),
            ("reserialize", 2, False),
        ),
        (
            changed(2, tool_calls=[CALL | {"args": {"stop": "Quay", "at": [40, 9]}}]),
            ("other", 2, True),
        ),
        (changed(6, content="Track 4, behind the red kiosk."), ("insert", 6, True)),
        (changed(6, content="I cannot say."), ("other", 6, False)),
        (changed(7, content="Thanks!  And the 10:10?\n"), ("reserialize", 7, False)),
        (changed(7, content="Thanks! And the 11:10?"), ("other", 7, True)),
    ],
)
def test_kinds_of_changes_in_place(new: list[dict], expected: tuple[str, int, bool]) -> None:
    kind, index, partial = expected
    assert edits_of(agent_messages(), new) == [(kind, (index,), (index,), partial)]


def test_inline_reasoning_that_goes_is_dropped_reasoning() -> None:
    old = [{"role": "assistant", "content": "<think>\nhm\n</think>\n\nFine."}]
    new = [{"role": "assistant", "content": "Fine."}]
    assert edits_of(old, new) == [("drop_reasoning", (0,), (0,), True)]


def test_unicode_form_is_a_matter_of_bytes() -> None:
    old, new = [{"role": "tool", "content": "Ka\u0308se"}], [{"role": "tool", "content": "Käse"}]
    assert edits_of(old, new) == [("reserialize", (0,), (0,), False)]


def test_true_and_one_are_different_values() -> None:
    old = [{"role": "tool", "content": '{"ok": 1}'}]
    new = [{"role": "tool", "content": '{"ok": true}'}]
    assert edits_of(old, new)[0][0] == "replace_tool_result"


def test_append_insert_delete() -> None:
    base, extra = agent_messages(), {"role": "user", "content": "Hello?"}
    assert edits_of(base, [*base, extra]) == [("append", (), (8,), False)]
    assert edits_of(base, [*base[:4], extra, *base[4:]]) == [("insert", (), (4,), False)]
    assert edits_of(base, base[:5] + base[7:]) == [
        ("delete", (5,), (), False),
        ("delete", (6,), (), False),
    ]
    assert edits_of([], base[:1]) == [("append", (), (0,), False)]
    assert edits_of(base[:1], []) == [("delete", (0,), (), False)]


def test_repeated_message_deleted_once() -> None:
    same = {"role": "user", "content": "Go on."}
    assert edits_of([same, same, same], [same, same]) == [("delete", (2,), (), False)]


def test_one_of_several_copies_that_changed_is_one_edit() -> None:
    """The first of two equal messages was taken for the second, so that one came and one went."""
    same = {"role": "user", "content": "Go on."}
    other = {"role": "user", "content": "Stop here."}
    assert edits_of([same, same], [other, same]) == [("other", (0,), (0,), False)]
    assert edits_of([same, same], [same, other]) == [("other", (1,), (1,), False)]


def test_moved_message() -> None:
    base = agent_messages()
    assert edits_of(base, [*base[:1], *base[2:], base[1]]) == [("move", (1,), (7,), False)]


def test_summary_replaces_several_messages() -> None:
    base = agent_messages()
    summary = {"role": "user", "content": "So far: the board and the map were asked."}
    answer = {"role": "assistant", "content": "Understood."}
    assert edits_of(base, [*base[:2], summary, *base[6:]]) == [
        ("summarize", (2, 3, 4, 5), (2,), False)
    ]
    assert edits_of(base, [*base[:2], summary, answer, *base[6:]]) == [
        ("summarize", (2, 3, 4, 5), (2,), False),
        ("insert", (), (3,), False),
    ]


def test_running_summary_takes_in_the_messages_behind_it() -> None:
    start = {"role": "user", "content": "Summary: " + LONG}
    longer = {"role": "user", "content": "Summary: " + LONG + "Then the board was asked."}
    rest = agent_messages()[1:]
    new = [longer | {"content": longer["content"].replace("quick", "slow")}, *rest[3:]]
    assert edits_of([start, *rest], new) == [
        ("summarize", (0,), (0,), True),
        ("delete", (1,), (), False),
        ("delete", (2,), (), False),
        ("delete", (3,), (), False),
    ]


def test_edited_turn_that_starts_the_rest_anew_is_no_summary() -> None:
    base = agent_messages()
    base[6]["content"] = LONG
    new = [*base[:6], {"role": "assistant", "content": LONG.replace("fox", "cat")}]
    assert edits_of(base, new) == [("other", (6,), (6,), True), ("delete", (7,), (), False)]


def test_results_are_paired_by_call_id_not_by_place() -> None:
    """Two results change and a new one comes between: order alone pairs the wrong ones."""
    old = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"{i}"} for i in (1, 2)]
    new = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"[{i}]"} for i in (1, 3, 2)]
    assert edits_of(old, new) == [
        ("replace_tool_result", (0,), (0,), False),
        ("insert", (), (1,), False),
        ("replace_tool_result", (1,), (2,), False),
    ]


def looked_up(number: int, result: str) -> list[dict]:
    arguments = {"name": "status", "arguments": f'{{"build": {number}}}'}
    call = {"id": f"c{number}", "type": "function", "function": arguments}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": result},
    ]


@pytest.mark.parametrize("results", [("running, 14 passed", "running, 15 passed"), ("a", "b c d")])
def test_calls_of_other_ids_are_other_calls(results: tuple[str, str]) -> None:
    """A trim that kept the newest pair alone counted as two edits of the pair before."""
    asked = {"role": "user", "content": "How is the build?"}
    before = [asked, *looked_up(1, results[0])]
    assert edits_of(before, [asked, *looked_up(2, results[1])]) == [
        ("append", (), (1,), False),
        ("delete", (1,), (), False),
        ("append", (), (2,), False),
        ("delete", (2,), (), False),
    ]


@pytest.mark.parametrize("acknowledged", [False, True])
def test_calls_behind_a_summary_are_no_part_of_it(acknowledged: bool) -> None:
    asked = {"role": "user", "content": "How is the build?"}
    before = [asked, *looked_up(1, "running, 14 passed"), *looked_up(2, "running, 15 passed")]
    summary = [{"role": "user", "content": "So far: two looks, and all is well."}]
    if acknowledged:
        summary.append({"role": "assistant", "content": "I see."})
    after = [asked, *summary, *looked_up(3, "running, 16 passed")]
    size = len(summary)
    assert edits_of(before, after) == [
        ("summarize", (1, 2, 3, 4), (1,), False),
        *[("append", (), (j,), False) for j in range(2, 3 + size)],
    ]


def test_a_call_that_got_an_id_is_still_the_same() -> None:
    """Only two different ids are a veto."""
    before, after = looked_up(1, "running, 14 passed"), looked_up(1, "running, 15 passed")
    before[1]["tool_call_id"] = None
    del before[0]["tool_calls"][0]["id"]
    assert edits_of(before, after) == [("replace_tool_result", (1,), (1,), True)]


def test_message_ids_do_not_pair_messages() -> None:
    """Programs that number messages give a summary the id of the first message it replaces."""
    old = [{"role": "user", "content": LONG + str(i), "id": f"m{i}"} for i in range(4)]
    new = [
        {"role": "user", "content": "They talked about a dog.", "id": "m0"},
        old[3] | {"id": "m1"},
    ]
    assert edits_of(old, new) == [("summarize", (0, 1, 2), (0,), False)]


def tool(name: str, **fields: Any) -> dict:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.mark.parametrize(
    ("new", "kind"),
    [
        ([tool("b"), tool("a", x=1, y=2)], "reorder"),
        ([tool("a", y=2, x=1), tool("b")], "reserialize"),
        ([tool("a", x=1, y=2)], "other"),
    ],
)
def test_tool_lists(new: list[dict], kind: str) -> None:
    messages = parse_messages(agent_messages())
    before = Conversation(messages, parse_tools([tool("a", x=1, y=2), tool("b")]))
    (edit,) = infer_edits(before, Conversation(messages, parse_tools(new)))
    assert (edit.kind.value, edit.scope) == (kind, "tools")
    assert (edit.old_indices, edit.new_indices) == ((), ())
    assert edit.before_hash != edit.after_hash


@given(message_lists, message_lists)
def test_every_message_is_accounted_for(old_list: list[dict], new_list: list[dict]) -> None:
    old, new = parse_messages(old_list), parse_messages(new_list)
    matching = match_messages(old, new)
    olds = [i for pairs in (matching.kept, matching.edited, matching.moved) for i, _ in pairs]
    news = [j for pairs in (matching.kept, matching.edited, matching.moved) for _, j in pairs]
    olds += [i for a, _ in matching.summarized for i in a] + matching.removed
    news += [j for _, j in matching.summarized] + matching.added
    assert sorted(olds) == list(range(len(old)))
    assert sorted(news) == list(range(len(new)))
    assert all(old[i].content_hash == new[j].content_hash for i, j in matching.kept)
    edits = infer_edits(old, new)
    named = {j for edit in edits for j in edit.new_indices}
    assert named == set(range(len(new))) - {j for _, j in matching.kept}


@given(message_lists, st.data())
def test_one_change_gives_one_edit(messages: list[dict], data: st.DataObject) -> None:
    parsed = parse_messages(messages)
    place = data.draw(st.integers(0, len(parsed)))
    marker = parse_messages([{"role": "user", "content": "a text that is nowhere else"}])
    (edit,) = infer_edits(parsed, parsed[:place] + marker + parsed[place:])
    # Among equal neighbours any place is right.
    assert edit.kind in (EditKind.INSERT, EditKind.APPEND)
    assert edit.new_indices == (place,)
    (edit,) = infer_edits(parsed[:place] + marker + parsed[place:], parsed)
    assert (edit.kind, edit.old_indices) == (EditKind.DELETE, (place,))


@given(texts, texts, texts)
def test_common_ends(prefix: str, middle: str, suffix: str) -> None:
    a, b = prefix + suffix, prefix + middle + suffix
    start, stop = common_ends(a, b)
    assert start >= len(prefix) and start + stop == len(a)
    assert a[:start] == b[:start] and a[len(a) - stop :] == b[len(b) - stop :]
    assert 0 <= text_similarity(a, b) <= 1 and text_similarity(a, a) == 1
