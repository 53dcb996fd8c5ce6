from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkv_agents.context import ContextHistory, Edit, EditKind, parse_messages
from patchkv_agents.context.frozen import IdSource
from patchkv_agents.errors import ContextError

from .samples import agent_messages, message_lists, messages


def committed() -> ContextHistory:
    history = ContextHistory()
    history.commit(agent_messages())
    return history


def test_empty_history() -> None:
    history = ContextHistory()
    assert history.head is None and history.log() == () and len(history) == 0
    with pytest.raises(ContextError, match="history is empty; commit messages first"):
        history.replace(0, "x")
    with pytest.raises(ContextError, match="no version 'x' among 0 .the history is empty"):
        history.get("x")


def test_commit_links_versions() -> None:
    history = committed()
    first = history.head
    assert first is not None and first.parents == () and first.edits == ()
    second = history.commit(
        [*agent_messages(), {"role": "assistant", "content": "10:12"}], author="a"
    )
    assert second.parents == (first.id,)
    assert history.head is second and history.log() == (second, first)
    assert history.get(first.id) is first and first.id in history
    (edit,) = second.edits
    assert (edit.kind, edit.new_indices, edit.author) == (EditKind.APPEND, (8,), "a")
    assert not edit.declared


def test_commit_of_the_same_context_makes_no_version() -> None:
    history = committed()
    head = history.head
    assert history.commit(agent_messages()) is head
    assert len(history) == 1
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = history.commit(agent_messages(), tools=tools)
    assert with_tools is not head and with_tools.edits[0].scope == "tools"
    assert history.commit(agent_messages(), tools=tools) is with_tools
    thinking = history.commit(agent_messages(), tools=tools, template_args={"thinking": True})
    assert [edit.scope for edit in thinking.edits] == ["template_args"]
    # A commit states the whole context: tools that are left out are gone.
    assert history.commit(agent_messages()).tools == ()


def test_versions_share_messages_and_cannot_change() -> None:
    history = committed()
    first = history.head
    second = history.replace("c1", "fresh")
    assert first is not None
    assert [a is b for a, b in zip(first.messages, second.messages, strict=True)] == [
        index != 3 for index in range(8)
    ]
    third = history.commit(agent_messages())
    assert third.messages[3] is first.messages[3]
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.messages[0].content = "x"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.messages = ()  # type: ignore[misc]


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


def test_declared_edits_name_what_changed() -> None:
    history = committed()
    new = agent_messages()
    new[5]["content"] = "Track 4 moved."
    new[6]["content"] = "Track 4, wherever it is now."
    said = [
        Edit.declare(EditKind.REFRESH_EVIDENCE, old=[5], new=[5], author="map"),
        Edit.declare(EditKind.REDACT, old=[5], new=[5], forget=True),
    ]
    evidence, other = history.commit(new, edits=said, author="node").edits
    assert evidence.kind is EditKind.REFRESH_EVIDENCE and evidence.author == "map"
    assert evidence.declared and not evidence.corrected
    assert evidence.forget  # of two declarations for one message, both count
    assert evidence.before_hash is not None
    assert not other.declared and other.author == "node"


def test_declared_edits_that_miss_are_corrected_not_lost() -> None:
    history = committed()
    new = agent_messages()
    new[5]["content"] = "Track 4 moved."
    said = [
        Edit.declare(EditKind.REFRESH_EVIDENCE, old=[4, 5], new=[4, 5]),
        Edit.declare(EditKind.REDACT, old=[1], new=[1], forget=True),
    ]
    evidence, redaction = history.commit(new, edits=said).edits
    assert (evidence.old_indices, evidence.corrected) == ((5,), True)
    assert (redaction.old_indices, redaction.forget, redaction.corrected) == ((), True, True)


def test_diff_of_any_two_versions() -> None:
    history = committed()
    first = history.head
    assert first is not None
    second = history.replace(3, "fresh")
    third = history.replace(5, "other")
    assert [edit.old_indices for edit in history.diff(first.id, third)] == [(3,), (5,)]
    assert [edit.old_indices for edit in history.diff(third, second.id)] == [(5,)]
    assert history.diff(first, first) == ()
    with pytest.raises(ContextError, match="no version 'v9' among 3 .the present one is"):
        history.diff("v9", first)


def test_copy_goes_its_own_way() -> None:
    history = committed()
    copy = history.copy()
    version = copy.replace(3, "fresh")
    assert copy.head is version and version.parents == (history.head.id,)
    assert len(history) == 1 and version.id not in history


def test_failed_commit_changes_nothing() -> None:
    history = committed()
    head = history.head
    with pytest.raises(ContextError):
        history.commit([*agent_messages(), {"role": "user"}])
    with pytest.raises(ContextError, match="template_args must be an object"):
        history.commit(agent_messages(), template_args=[1])  # type: ignore[arg-type]
    assert history.head is head and len(history) == 1


@pytest.mark.parametrize("times", [[5, 5, 5], [9, 3, 9], [1, 2, 3]])
def test_ids_ascend_whatever_the_clock_does(times: list[int]) -> None:
    clock = iter([time * 1_000_000 for time in times] * 30_000)
    source = IdSource(lambda: next(clock))
    ids = [source.next() for _ in range(70_000)]
    assert ids == sorted(ids) and len(set(ids)) == len(ids)


def test_ids_say_nothing_of_the_content() -> None:
    one, two = committed().head, committed().head
    assert one is not None and two is not None
    assert one.messages == two.messages and one.id != two.id


@settings(max_examples=50)
@given(st.lists(message_lists, max_size=6))
def test_history_keeps_every_version(snapshots: list[list[dict]]) -> None:
    history = ContextHistory()
    distinct: list[tuple] = []
    for snapshot in snapshots:
        version = history.commit(snapshot)
        if not distinct or distinct[-1] != parse_messages(snapshot):
            distinct.append(parse_messages(snapshot))
        assert version is history.head
    log = history.log()
    assert [version.messages for version in reversed(log)] == distinct
    assert [v.id for v in log] == sorted((v.id for v in log), reverse=True)
    for newer, older in zip(log, log[1:], strict=False):
        assert newer.parents == (older.id,)
        kinds = [edit.kind for edit in history.diff(older, newer)]
        assert kinds == [edit.kind for edit in newer.edits]
    objects = {id(message) for version in log for message in version.messages}
    values = {message for version in log for message in version.messages}
    assert len(objects) == len(values)


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
