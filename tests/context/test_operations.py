from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkv_agents.context import ContextHistory, EditKind, parse_messages
from patchkv_agents.errors import ContextError

from .samples import agent_messages, messages


def committed() -> ContextHistory:
    history = ContextHistory()
    history.commit(agent_messages(), tools=[{"name": "f"}], template_args={"a": 1})
    return history


def edits_of(history: ContextHistory) -> list[tuple]:
    assert history.head is not None
    return [
        (edit.kind.value, edit.old_indices, edit.new_indices, edit.declared, edit.corrected)
        for edit in history.head.edits
    ]


def texts_of(history: ContextHistory) -> list[str]:
    assert history.head is not None
    return [message.text for message in history.head.messages]


@pytest.mark.parametrize("target", [3, "m3", "c1"])
def test_replace_by_index_id_and_tool_call_id(target: int | str) -> None:
    history = committed()
    version = history.replace(target, "fresh", author="board", forget=True)
    (edit,) = version.edits
    assert version.messages[3].content == "fresh" and version.messages[3].id == "m3"
    assert edit.kind is EditKind.REPLACE_TOOL_RESULT
    assert (edit.old_indices, edit.new_indices) == ((3,), (3,))
    assert edit.declared and edit.forget and not edit.corrected and edit.author == "board"
    assert edit.after_hash == version.messages[3].content_hash


def test_replace_keeps_tools_and_template_args() -> None:
    history = ContextHistory()
    first = history.commit(agent_messages(), tools=[{"name": "f"}], template_args={"a": 1})
    second = history.replace(3, "fresh")
    assert (second.tools, second.template_args) == (first.tools, first.template_args)


def test_replace_with_the_same_content_makes_no_version() -> None:
    history = committed()
    assert history.replace(3, '{"track": 4}') is history.head
    assert len(history) == 1


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (8, "no message 8; this version has 8, from 0"),
        (-1, "no message -1"),
        (True, "by index, id or tool_call_id, not by True"),
        (1.0, "not by 1.0"),
        ("c9", "No message has id or tool_call_id 'c9'. There are 'm0', 'm1'.*'c1'"),
        (0, "Message 0 is a system message, not a tool result"),
    ],
)
def test_replace_says_what_there_is(target: Any, problem: str) -> None:
    history = committed()
    with pytest.raises(ContextError, match=problem):
        history.replace(target, "x")
    assert len(history) == 1


def test_replace_needs_to_know_which() -> None:
    """Some models begin with call_0 in each turn."""
    history = ContextHistory()
    result = {"role": "tool", "tool_call_id": "call_0"}
    history.commit([result | {"content": "a"}, result | {"content": "b"}])
    with pytest.raises(ContextError, match="'call_0' names messages 0, 1; pass one of these"):
        history.replace("call_0", "x")
    assert history.replace(1, "c").messages[1].content == "c"
    history.commit([{"role": "user", "content": "a"}])
    with pytest.raises(ContextError, match="None has one; use an index below 1"):
        history.replace("a", "x")


def test_replace_of_another_kind() -> None:
    history = committed()
    version = history.replace(0, "Be brief.", kind=EditKind.REWRITE_SYSTEM)
    assert version.edits[0].kind is EditKind.REWRITE_SYSTEM
    with pytest.raises(ContextError, match=r"Message 1 \(user\) needs content"):
        history.replace(1, None, kind=EditKind.OTHER)
    with pytest.raises(ContextError, match="Message 3, field 'content': must be text"):
        history.replace(3, 7)  # type: ignore[arg-type]


def test_revise() -> None:
    history = committed()
    history.revise("m4", "1. Look at the map.")
    assert edits_of(history) == [("revise_plan", (4,), (4,), True, False)]
    assert history.head.messages[4].tool_calls == parse_messages(agent_messages())[4].tool_calls


def test_summarize() -> None:
    history = committed()
    history.summarize(range(1, 7), "Track 4, behind the kiosk.", author="summarizer")
    assert edits_of(history) == [("summarize", (1, 2, 3, 4, 5, 6), (1,), True, False)]
    assert texts_of(history)[1:] == ["Track 4, behind the kiosk.", "Thanks! And the 10:10?"]
    assert history.head.messages[1].role == "user" and history.head.author == "summarizer"
    history = committed()
    history.summarize(["c1", "m4", "c2"], {"role": "assistant", "content": "Board and map."})
    assert edits_of(history) == [("summarize", (3, 4, 5), (3,), True, False)]
    with pytest.raises(ContextError, match="Messages 0, 2 do not follow each other"):
        history.summarize([0, 2], "x")
    with pytest.raises(ContextError, match="Name at least one message"):
        history.summarize(range(0), "x")


def test_delete() -> None:
    history = committed()
    history.delete("m6")
    assert edits_of(history) == [("delete", (6,), (), True, False)]
    history.delete(["c2", 3, "c1"])
    assert edits_of(history) == [
        ("delete", (3,), (), True, False),
        ("delete", (5,), (), True, False),
    ]
    assert [m.id for m in history.head.messages] == ["m0", "m1", "m2", "m4", "m7"]


def test_insert() -> None:
    history = committed()
    history.insert("m1", {"role": "developer", "content": "Be brief."})
    assert edits_of(history) == [("insert", (), (1,), True, False)]
    history.insert(9, {"role": "assistant", "content": "10:12"})
    assert edits_of(history) == [("append", (), (9,), True, False)]
    with pytest.raises(ContextError, match="There is no message 11; this version has 10"):
        history.insert(11, {"role": "user", "content": "x"})
    with pytest.raises(ContextError, match="Message 0, field 'role'"):
        history.insert(0, {"content": "x"})
    history.insert(10, {"role": "user", "content": "x", "id": "m2"})  # message 3 has it
    assert history.head.messages[10].id is None


@pytest.mark.parametrize(("index", "to"), [(1, 6), (6, 1), (2, 3), (3, 2), (7, 0)])
def test_move(index: int, to: int) -> None:
    history = committed()
    history.move(index, to)
    order = [f"m{i}" for i in range(8)]
    order.insert(to, order.pop(index))
    assert [m.id for m in history.head.messages] == order
    (edit,) = history.head.edits
    assert edit.kind is EditKind.MOVE and edit.declared and not edit.corrected
    assert history.move(3, 3) is history.head and len(history) == 2


def test_redact_without_forgetting_keeps_the_past() -> None:
    history = committed()
    history.redact("c1", forget=False)
    assert edits_of(history) == [("redact", (3,), (3,), True, False)]
    assert texts_of(history)[3] == "[removed]" and history.head.forgotten is None
    assert history.log()[1].messages[3].text == '{"track": 4}'
    with pytest.raises(ContextError, match="Name at least one message"):
        history.redact()


def test_redact_empties_reasoning_and_arguments() -> None:
    history = committed()
    message = history.redact("m2", "Asked the board.", forget=False).messages[2]
    assert (message.content, message.reasoning) == ("Asked the board.", None)
    assert [(call.id, call.name, call.arguments) for call in message.tool_calls] == [
        ("c1", "board", {})
    ]


@given(st.lists(messages, min_size=1, max_size=5), st.data())
def test_replace_changes_one_message_only(given_messages: list[dict], data: st.DataObject) -> None:
    history = ContextHistory()
    before = history.commit(given_messages)
    index = data.draw(st.integers(0, len(given_messages) - 1))
    after = history.replace(index, "a text that is nowhere else", kind=EditKind.OTHER)
    assert after.messages[index].content == "a text that is nowhere else"
    assert after.messages[:index] == before.messages[:index]
    assert after.messages[index + 1 :] == before.messages[index + 1 :]
    assert [(e.kind, e.old_indices, e.declared) for e in after.edits] == [
        (EditKind.OTHER, (index,), True)
    ]
