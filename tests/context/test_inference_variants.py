"""Inference on many variants of the edits that programs make, with other words and other places."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest

from patchkv_agents.context import infer_edits, parse_messages, parse_tools
from patchkv_agents.context.messages import Conversation

Messages = list[dict[str, Any]]

REPORT = " ".join(f"Section {i} weighs {i * 37 % 101} reasons for and against." for i in range(60))
PASSAGES = [f"[{i}] The {n} mill was built in {1700 + 13 * i}, near the ford." for i, n in
            enumerate(("upper", "lower", "old", "royal", "paper"))]  # fmt: skip
NOTE = "<note>\nAnswer in French.\n- The file `a.py` is open.\n- No task list.\n</note>"


def result(call: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": content}


def request(call: str, name: str, **arguments: Any) -> dict[str, Any]:
    calls = [{"id": call, "name": name, "args": arguments}]
    return {"role": "assistant", "content": f"I call {name}.", "tool_calls": calls}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def conversation() -> Messages:
    """Sixteen messages: four calls with results, one of them a long write, and small talk."""
    return [
        {"role": "system", "content": "You help with a history of mills. It is 12:04."},
        user("Find out which mills still stand, and start the report."),
        request("c1", "search", query="mills", limit=5),
        result("c1", "\n".join(PASSAGES)),
        request("c2", "write_file", path="/out/report.md", text=REPORT),
        result("c2", '{"ok": true, "bytes": 3120}'),
        assistant("The first part is written; five mills are in it. Shall I go on?"),
        user("Yes please."),
        request("c3", "search", query="millers"),
        result("c3", "The millers' guild met at Säter every spring, says a chronicle of 1742."),
        assistant("The guild of the millers is worth a section of its own."),
        user("Good idea. Keep it short, the whole report must fit on two pages."),
        request("c4", "check", path="/out/report.md"),
        result("c4", "2 pages, 0 warnings"),
        assistant("It fits on two pages."),
        user("When was the paper mill built, and who says so?"),
    ]


def edits_of(old: Messages, new: Messages) -> list[tuple[str, tuple, tuple, bool]]:
    found = infer_edits(parse_messages(old), parse_messages(new))
    return [(edit.kind.value, edit.old_indices, edit.new_indices, edit.partial) for edit in found]


def changed(index: int, **fields: Any) -> Messages:
    messages = conversation()
    messages[index] |= fields
    return messages


def with_arguments(index: int, **arguments: Any) -> Messages:
    messages = conversation()
    messages[index]["tool_calls"][0]["args"] |= arguments
    return messages


def noted(index: int, place: Callable[[str], str] = lambda text: f"{text}\n\n{NOTE}") -> Messages:
    """The conversation with the note in one message."""
    return changed(index, content=place(conversation()[index]["content"]))


TURN = [assistant("In 1752, says passage 4."), user("Thanks. Put that into the report.")]


# --- a block that moves ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        lambda text: f"{text}\n\n{NOTE}",
        lambda text: f"{NOTE}\n\n{text}",
        lambda text: f"{text} {NOTE}",
        lambda text: f"{text[:20]}\n{NOTE}\n<p>{text[20:]}",
    ],
    ids=["end", "start", "same line", "middle"],
)
@pytest.mark.parametrize("index", [1, 7, 11])
def test_note_moves_to_the_newest_message_which_is_new(index: int, place: Callable) -> None:
    """Message 7 is so short that what is left of it says little."""
    old = noted(index, place)
    new = changed(index, content=place(conversation()[index]["content"]).replace(NOTE, "").strip())
    new += [TURN[0], user(f"{TURN[1]['content']}\n{NOTE}")]
    kind, *rest = edits_of(old, new)
    assert kind == ("delete", (index,), (index,), True)
    assert rest == [("append", (), (16,), False), ("move", (index,), (17,), True)]


def test_note_moves_between_two_results_that_both_stay() -> None:
    assert edits_of(noted(3), noted(13)) == [
        ("delete", (3,), (3,), True),
        ("move", (3,), (13,), True),
        ("replace_tool_result", (13,), (13,), True),
    ]


def test_note_that_is_a_message_of_its_own_moves() -> None:
    note, base = user(NOTE), conversation()
    old, new = [*base[:2], note, *base[2:]], [*base, *TURN, note]
    assert edits_of(old, new) == [
        ("append", (), (16,), False),
        ("append", (), (17,), False),
        ("move", (2,), (18,), False),
    ]


def test_note_that_changes_as_it_moves_is_deleted_and_appended() -> None:
    new = [*conversation(), TURN[0], user("Thanks.\n" + NOTE.replace("French", "Greek"))]
    kinds = [edit[0] for edit in edits_of(noted(11), new)]
    assert kinds == ["delete", "append", "append"]


def test_note_that_comes_again_while_it_stays_is_no_move() -> None:
    new = [*noted(11), TURN[0], user("Thanks.\n" + NOTE)]
    assert [edit[0] for edit in edits_of(noted(11), new)] == ["append", "append"]


def test_what_is_said_again_did_not_move() -> None:
    """A short message falls out at the front, and someone says the same at the end."""
    nod, base = user("OK!"), conversation()
    assert edits_of([base[0], nod, *base[1:]], [*base, assistant("In 1752."), nod]) == [
        ("delete", (1,), (), False),
        ("append", (), (16,), False),
        ("append", (), (17,), False),
    ]


# --- texts that are cut ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        REPORT[:20] + "...(cut)",
        REPORT[:300] + "\n[2,981 characters left out]",
        REPORT[:100] + " [...] " + REPORT[-100:],
        REPORT[:12] + "…",
        REPORT[: len(REPORT) // 2],
        "",
        "[old argument removed]",
    ],
)
def test_shortened_arguments_are_partial_deletions(text: str) -> None:
    assert edits_of(conversation(), with_arguments(4, text=text)) == [("delete", (4,), (4,), True)]


def test_shortened_arguments_of_two_calls_in_one_message() -> None:
    def with_calls(cut: Callable[[str], str]) -> Messages:
        messages = conversation()
        calls = [request(f"c2{x}", "write", path=x, text=cut(x + REPORT)) for x in "ab"]
        messages[4]["tool_calls"] = [call["tool_calls"][0] for call in calls]
        return messages

    old, new = with_calls(lambda text: text), with_calls(lambda text: text[:20] + " (more)")
    assert edits_of(old, new) == [("delete", (4,), (4,), True)]


def test_arguments_that_say_something_else_are_no_deletion() -> None:
    new = with_arguments(4, text=REPORT.replace("reasons", "arguments"))
    assert edits_of(conversation(), new) == [("other", (4,), (4,), True)]
    new = with_arguments(8, query="guild")
    assert edits_of(conversation(), new) == [("other", (8,), (8,), True)]


@pytest.mark.parametrize("text", ["[cleared]", "", "(result removed to save space)"])
def test_cleared_results_are_replaced(text: str) -> None:
    assert edits_of(conversation(), changed(3, content=text)) == [
        ("replace_tool_result", (3,), (3,), False)
    ]


def test_result_cut_with_a_marker_is_replaced_and_without_one_cut() -> None:
    head = "\n".join(PASSAGES[:3])
    found = edits_of(conversation(), changed(3, content=head + "\n(2 more lines)"))
    assert found == [("replace_tool_result", (3,), (3,), True)]
    assert edits_of(conversation(), changed(3, content=head)) == [("delete", (3,), (3,), True)]


def test_parts_and_calls_that_go_or_come() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    text = {"type": "text", "text": "What is on this picture of the mill?"}
    with_picture, without = changed(11, content=[text, picture]), changed(11, content=[text])
    assert edits_of(with_picture, without) == [("delete", (11,), (11,), True)]
    assert edits_of(without, with_picture) == [("insert", (11,), (11,), True)]
    # Text that stands for the picture was taken for the whole of the change.
    marked = changed(11, content=[text, {"type": "text", "text": "[picture removed]"}])
    assert edits_of(with_picture, marked) == [("delete", (11,), (11,), True)]
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}
    longer = changed(11, content=[{**text, "text": text["text"] + " And here?"}, other])
    assert edits_of(with_picture, longer) == [("other", (11,), (11,), True)]
    thought = {"type": "thinking", "thinking": "Two pages.", "signature": "x"}
    answer = {"type": "text", "text": "It fits on two pages."}
    old, new = changed(14, content=[thought, answer]), changed(14, content=[answer])
    assert edits_of(old, new) == [("drop_reasoning", (14,), (14,), True)]
    two = conversation()
    two[8]["tool_calls"] *= 2
    assert edits_of(two, conversation()) == [("delete", (8,), (8,), True)]


def test_neighbours_that_all_say_something_else_stay_where_they_are() -> None:
    """Two messages in a row with nothing in common with those before were gone, and two new."""
    new = conversation()
    new[6], new[7] = assistant("Nothing is written so far."), user("Stop, and ask the archive.")
    assert edits_of(conversation(), new) == [
        ("other", (6,), (6,), False),
        ("other", (7,), (7,), False),
    ]


def test_a_role_by_its_other_name() -> None:
    new = changed(0, role="developer")
    assert edits_of(conversation(), new) == [("rewrite_system", (0,), (0,), True)]


# --- other bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "content"),
    [
        (9, unicodedata.normalize("NFD", conversation()[9]["content"])),
        (9, conversation()[9]["content"] + "\n"),
        (9, "\u00a0" + conversation()[9]["content"].replace(" ", "\n", 3)),
        (5, '{"bytes":3120.0,"ok":true}'),
        (5, '{\n  "ok": true,\n  "bytes": 3120\n}\n'),
        (11, conversation()[11]["content"].replace(". ", ".\r\n")),
    ],
)
def test_other_bytes_with_the_same_values(index: int, content: Any) -> None:
    found = edits_of(conversation(), changed(index, content=content))
    assert found == [("reserialize", (index,), (index,), False)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"name": "Säter", "n": [1, 2]}, {"n": [1, 2], "name": "Säter"}),
        ({"name": "Säter"}, '{"name": "S\\u00e4ter"}'),
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}'),
    ],
)
def test_arguments_written_in_another_way(old: Any, new: Any) -> None:
    def called(arguments: Any) -> Messages:
        messages = conversation()
        messages[8]["tool_calls"] = [{"id": "c3", "name": "search", "args": arguments}]
        return messages

    assert edits_of(called(old), called(new)) == [("reserialize", (8,), (8,), False)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"ok": "a  b"}', '{"ok": "a b"}'),
        ('{"n": 1}', '{"n": true}'),
        ("x² costs 3", "x2 costs 3"),
        ("[1, 2]", "1 2"),
    ],
)
def test_other_values_are_not_mere_bytes(old: str, new: str) -> None:
    found = edits_of(changed(5, content=old), changed(5, content=new))
    assert found[0][0] == "replace_tool_result"


# --- summaries ---------------------------------------------------------------------------------

SUMMARY = "Until now: five mills were found (1700 to 1752), the report's first part is written."


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize("acknowledged", [False, True])
@pytest.mark.parametrize("last", [11, 16])
def test_summaries(role: str, acknowledged: bool, last: int) -> None:
    """With an acknowledgement or without, before messages that stay or in place of all of them."""
    base = conversation()
    new = [*base[:2], {"role": role, "content": SUMMARY}]
    new += [user("OK, go on.") if role == "assistant" else assistant("OK.")] * acknowledged
    comes = "insert" if last < 16 else "append"
    assert edits_of(base, [*new, *base[last:]]) == [
        ("summarize", tuple(range(2, last)), (2,), False),
        *[(comes, (), (3,), False)] * acknowledged,
    ]


def test_running_summary_that_only_grows() -> None:
    base = conversation()
    base[1] = user(SUMMARY)
    new = [base[0], user(SUMMARY + " The guild got its own section."), *base[11:]]
    assert edits_of(base, new) == [
        ("summarize", (1,), (1,), True),
        *[("delete", (i,), (), False) for i in range(2, 11)],
    ]


def test_count_of_what_is_left_out() -> None:
    base = conversation()
    old = [base[0], {"role": "system", "content": "(12 earlier messages)"}, *base[6:]]
    new = [base[0], {"role": "system", "content": "(14 earlier messages)"}, *base[8:], *TURN]
    assert edits_of(old, new) == [
        ("summarize", (1,), (1,), True),
        ("delete", (2,), (), False),
        ("delete", (3,), (), False),
        ("append", (), (10,), False),
        ("append", (), (11,), False),
    ]


# --- several at once ---------------------------------------------------------------------------


def test_several_edits_at_once() -> None:
    """The clock ticks, a result is cleared, a call cut, a repair inserted, a turn appended."""
    new = with_arguments(4, text=REPORT[:30] + "... (shortened)")
    new[0]["content"] = new[0]["content"].replace("12:04", "12:09")
    new[3]["content"] = "[cleared]"
    new[14]["content"] = "It fits on 2 pages."
    new = [*new[:10], result("c9", "The call was cut off."), *new[10:], *TURN]
    assert edits_of(conversation(), new) == [
        ("rewrite_system", (0,), (0,), True),
        ("replace_tool_result", (3,), (3,), False),
        ("delete", (4,), (4,), True),
        ("insert", (), (10,), False),
        ("other", (14,), (15,), True),
        ("append", (), (17,), False),
        ("append", (), (18,), False),
    ]


def test_sliding_window_over_results() -> None:
    """With each turn one more result is cleared, to the same placeholder."""
    old, new = changed(3, content="[old]"), changed(3, content="[old]")
    new[5]["content"] = "[old]"
    assert edits_of(old, [*new, *TURN]) == [
        ("replace_tool_result", (5,), (5,), False),
        ("append", (), (16,), False),
        ("append", (), (17,), False),
    ]


def test_refreshed_and_reordered_passages() -> None:
    order = [PASSAGES[i] for i in (1, 0, 4, 3, 2)]
    order[2] = order[2].replace("ford", "weir")
    new = changed(3, content="\n".join(order))
    assert edits_of(conversation(), new) == [("replace_tool_result", (3,), (3,), True)]
    old = changed(1, content="\n".join(["Look at these:", *PASSAGES]))
    new = changed(1, content="\n".join(["Look at these:", *order]))
    assert edits_of(old, new) == [("other", (1,), (1,), True)]


def test_masked_values_are_a_partial_rewrite() -> None:
    old = changed(7, content="Yes please, my number is 0171-555-0199, ring me when it is done.")
    new = changed(7, content="Yes please, my number is ############, ring me when it is done.")
    assert edits_of(old, new) == [("other", (7,), (7,), True)]


def test_ids_tell_which_of_several_copies_went() -> None:
    base = conversation()
    copies = [user("Go on.") | {"id": f"g{i}"} for i in range(4)]
    for gone in range(4):
        rest = [copy for i, copy in enumerate(copies) if i != gone]
        found = edits_of([*base, *copies, base[6]], [*base, *rest, base[6]])
        assert found == [("delete", (16 + gone,), (), False)]
    without_ids = [user("Go on.")] * 4
    assert edits_of([*base, *without_ids], [*base, *without_ids[:3]])[0][1] == (19,)


def test_ids_that_are_numbered_anew_lose_no_pairs() -> None:
    """An insertion shifts all numbers: two of the equal messages then have each other's ids."""
    nod = user("Go on.")
    texts = [user("A" * 20), nod, user("B" * 20), nod, user("C" * 20), nod]
    old = [message | {"id": f"m{i}"} for i, message in enumerate(texts)]
    new = [user("first"), user("second"), *texts]
    new = [message | {"id": f"m{i}"} for i, message in enumerate(new)]
    assert edits_of(old, new) == [("insert", (), (0,), False), ("insert", (), (1,), False)]


def test_tools_in_another_order_and_written_in_another_way() -> None:
    messages = parse_messages(conversation())
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"x": 1, "y": 2}}}
        for name in ("a", "b", "c")
    ]
    other = json.loads(json.dumps(tools, sort_keys=True))[::-1]
    before, after = (Conversation(messages, parse_tools(each)) for each in (tools, other))
    assert [edit.kind.value for edit in infer_edits(before, after)] == ["reorder"]
