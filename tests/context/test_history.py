from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkv_agents.context import (
    ContextHistory,
    Edit,
    EditKind,
    MemoryHistoryStore,
    Message,
    ThreadKey,
    parse_messages,
)
from patchkv_agents.context.frozen import IdSource
from patchkv_agents.context.lineage.forms import predecessors
from patchkv_agents.context.versioning.drafts import recognized
from patchkv_agents.errors import ConflictError, ContextError, HistoryStoreError

from .samples import agent_messages, message_lists


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
    assert evidence.before_hash is None  # a hash of what is forgotten would give it away
    assert not other.declared and other.author == "node"


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


def test_a_fork_goes_its_own_way() -> None:
    history = committed()
    fork = history.fork("elsewhere")
    version = fork.replace(3, "fresh")
    assert fork.head is version and version.parents == (history.head.id,)
    assert len(history) == 1 and version.id not in history and len(fork) == 2
    assert fork.key == ThreadKey("elsewhere") and fork.store is history.store
    with pytest.raises(HistoryStoreError, match="There is a thread elsewhere already"):
        history.fork("elsewhere")
    assert history.fork().key != history.fork().key
    assert len(ContextHistory().fork()) == 0
    with pytest.raises(HistoryStoreError, match="There is a thread elsewhere already"):
        ContextHistory(history.store, thread="new").fork("elsewhere")
    fork.delete_thread()
    assert history.get(history.head.id) == history.head
    assert history.store.threads().count(fork.key) == 0


def test_failed_commit_changes_nothing() -> None:
    history = committed()
    head = history.head
    with pytest.raises(ContextError):
        history.commit([*agent_messages(), {"content": "x"}])
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


def contents(history: ContextHistory) -> list[Any]:
    assert history.head is not None
    return [message.content for message in history.head.messages]


def user(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def test_branches() -> None:
    history = ContextHistory()
    first = history.commit(user("a"))
    second = history.commit(user("a", "b"))
    assert history.branch("try", first.id) is not None
    assert history.branches() == {"main": second.id, "try": first.id}
    assert history.head == second and history.branch_name == "main"
    with pytest.raises(ContextError, match="There is a branch 'try' already"):
        history.branch("try")
    with pytest.raises(ContextError, match="A branch needs a name, not ''"):
        history.branch("")
    assert history.checkout("try") == first and history.branch_name == "try"
    third = history.commit(user("a", "c"))
    assert third.parents == (first.id,)
    assert history.branches() == {"main": second.id, "try": third.id}
    assert history.checkout("main") == second
    assert history.log("try") == (third, first)
    assert history.version_ids() == (first.id, second.id, third.id)


def test_going_on_from_an_older_version_begins_a_branch() -> None:
    """Time travel: nothing that came after is lost."""
    history = ContextHistory()
    first = history.commit(user("a"))
    second = history.commit(user("a", "b"))
    history.checkout(first.id)
    assert history.branch_name is None and history.head == first
    other = history.commit(user("a", "c"))
    assert history.branch_name == "main-2" and other.parents == (first.id,)
    third = history.commit(user("a", "d"), parent=first.id)
    assert history.branch_name == "main-2-2" and third.parents == (first.id,)
    assert history.branches() == {"main": second.id, "main-2": other.id, "main-2-2": third.id}
    # The newest version of a branch goes on with that branch.
    fourth = history.commit(user("a", "b", "e"), parent=second)
    assert history.branches()["main"] == fourth.id and history.branch_name == "main"
    fifth = history.commit(user("a", "f"), parent=first, branch="named")
    assert history.branch_name == "named" and history.log() == (fifth, first)
    with pytest.raises(ConflictError, match="is not the newest one of branch 'main'"):
        history.commit(user("a", "g"), parent=first, branch="main")
    assert history.head == fifth and len(history) == 6
    # An operation on an older version begins a branch too.
    history.checkout(first)
    sixth = history.insert(1, {"role": "user", "content": "h"})
    assert sixth.parents == (first.id,) and len(history.branches()) == 5


def test_commit_to_another_branch() -> None:
    history = ContextHistory()
    first = history.commit(user("a"))
    side = history.commit(user("a", "b"), branch="side")
    assert side.parents == (first.id,) and history.branch_name == "side"
    again = history.commit(user("a", "c"), branch="main")
    assert again.parents == (first.id,) and history.branch_name == "main"
    assert history.commit(user("a", "c"), branch="same") == again
    assert history.branches()["same"] == again.id and len(history) == 3


def test_a_merge_has_several_parents() -> None:
    history = ContextHistory()
    first = history.commit(user("a"))
    side = history.commit(user("a", "found this", "and that"), branch="side")
    merged = history.commit(user("a", "a summary"), branch="main", merged=["side"])
    assert merged.parents == (first.id, side.id)
    assert [edit.kind for edit in merged.edits] == [EditKind.APPEND]
    assert history.log() == (merged, first)
    assert history.blame(1)[0].version_id == merged.id


def test_versions_and_edits_name_their_thread_and_checkpoint() -> None:
    history = ContextHistory(thread="t", namespace="sub")
    history.commit(user("a"), checkpoint_id="c1")
    version = history.commit(user("a", "b"), checkpoint_id="c2")
    (edit,) = version.edits
    assert version.checkpoint_id == "c2"
    assert (edit.thread, edit.namespace, edit.checkpoint_id) == ("t", "sub", "c2")


@pytest.mark.parametrize("bad", ["", 3, "\ud800"])
def test_names_of_threads_are_checked(bad: Any) -> None:
    with pytest.raises(ContextError, match="thread"):
        ContextHistory(thread=bad)


def test_opening_a_thread_that_is_there() -> None:
    store = MemoryHistoryStore()
    first = ContextHistory(store, thread="t").commit(user("a"))
    history = ContextHistory(store, thread="t")
    assert history.head == first
    with pytest.raises(ContextError, match="no version 'side' among 1 .*branches: 'main'"):
        ContextHistory(store, thread="t", branch="side")
    assert ContextHistory(store, thread="t", namespace="n").head is None


def test_two_writers_on_one_branch() -> None:
    """Whole lists follow what is newest; operations on one message must have seen it."""
    store = MemoryHistoryStore()
    mine = ContextHistory(store, thread="t")
    mine.commit(user("a", "b"))
    theirs = ContextHistory(store, thread="t")
    second = theirs.insert(0, {"role": "user", "content": "new first"})
    for operation in (
        lambda: mine.replace(1, "x", kind=EditKind.OTHER),
        lambda: mine.delete(0),
        lambda: mine.redact(secrets=["something"]),
    ):
        with pytest.raises(
            ConflictError, match=r"another writer committed to it. Call refresh\(\)"
        ):
            operation()
    assert mine.branches() == {"main": second.id} and len(mine) == 2
    third = mine.commit(user("a", "b", "c"))
    assert third.parents == (second.id,)
    assert [edit.kind for edit in third.edits] == [EditKind.DELETE, EditKind.APPEND]
    assert theirs.head == second and theirs.refresh() == third
    assert theirs.delete(0).messages == third.messages[1:]


def test_declared_edits_when_another_writer_was_quicker() -> None:
    """Old indices mean the version that the caller saw, not the one that is newest by now."""
    store = MemoryHistoryStore()
    mine = ContextHistory(store, thread="t")
    mine.commit(agent_messages())
    theirs = ContextHistory(store, thread="t")
    theirs.insert(1, {"role": "user", "content": "something else"})
    new = agent_messages()
    new[3]["content"] = "none"
    said = Edit.declare(EditKind.REFRESH_EVIDENCE, old=[3], author="board")
    edits = mine.commit(new, edits=[said]).edits
    assert [(e.kind, e.old_indices, e.declared) for e in edits] == [
        (EditKind.DELETE, (1,), False),
        (EditKind.REFRESH_EVIDENCE, (4,), True),
    ]


def test_a_thread_that_was_deleted_meanwhile() -> None:
    store = MemoryHistoryStore()
    history = ContextHistory(store, thread="t")
    history.commit(user("a"))
    ContextHistory(store, thread="t").delete_thread()
    with pytest.raises(ConflictError, match="was deleted by another writer"):
        history.commit(user("a", "b"))
    with pytest.raises(ConflictError, match="or is of another thread"):
        history.commit(user("a"), parent=ContextHistory().commit(user("a")))
    assert history.refresh() is None and store.threads() == ()
    assert history.commit(user("a", "b")).parents == ()


def test_revert() -> None:
    history = ContextHistory()
    first = history.commit(user("a"), tools=[{"name": "f"}], template_args={"x": 1})
    with pytest.raises(ContextError, match="This is the first version"):
        history.revert()
    history.commit(user("a", "b"))
    back = history.revert(author="me")
    assert (back.messages, back.tools, back.template_args) == (
        first.messages,
        first.tools,
        first.template_args,
    )
    assert [edit.scope for edit in back.edits] == ["template_args", "tools", "messages"]
    assert back.edits[2].kind is EditKind.DELETE and back.author == "me"
    assert len(history) == 3 and history.revert(first) is back


def test_blame_tells_every_form() -> None:
    history = ContextHistory()
    messages = agent_messages()
    first = history.commit(messages)
    second = history.replace("c1", '{"track": 5}', author="board")
    history.insert(0, {"role": "system", "content": "Be brief."})
    history.move("m3", 1)
    summary = history.summarize(range(1, 4), "All about track 5.")
    assert [m.id for m in first.messages][:4] == ["m0", "m1", "m2", "m3"]
    found = history.blame(1)
    assert [(form.version_id, form.index) for form in found] == [
        (summary.id, 1),
        (second.id, 3),
        (first.id, 0),
        (first.id, 1),
        (first.id, 3),
    ]
    assert found[0].edit is not None and found[0].edit.kind is EditKind.SUMMARIZE
    assert found[1].edit is not None and found[1].edit.author == "board"
    assert [form.message for form in found[2:]] == [first.messages[i] for i in (0, 1, 3)]
    assert all(form.edit is None for form in found[2:])
    assert [form.version_id for form in history.blame("m4")] == [first.id]
    assert history.blame("m3", second.id) == history.blame(3, second)
    with pytest.raises(ContextError, match="No message has id or tool_call_id 'c9'"):
        history.blame("c9")


def test_show() -> None:
    history = committed()
    assert history.show() == history.show("main") == history.show(history.head.id) == history.head
    with pytest.raises(ContextError, match="history is empty"):
        ContextHistory().show()


def clear(messages: list[dict], index: int) -> Edit:
    """As a middleware that clears old results in each request, and says so each time."""
    messages[index] = messages[index] | {"content": "[cleared]"}
    return Edit.declare(
        EditKind.DELETE,
        tool_call_ids=[messages[index]["tool_call_id"]],
        where="request",
        author="clear",
    )


def test_an_edit_of_each_request_is_recorded_once() -> None:
    history = ContextHistory()
    history.commit(agent_messages())
    state = agent_messages()
    for turn in range(5):
        state.append({"role": "user", "content": f"turn {turn}", "id": f"n{turn}"})
        request = [dict(message) for message in state]
        said = [clear(request, 3)]
        if turn > 2:
            said.append(clear(request, 5))
        history.commit(request, edits=said)
    recorded = [
        (edit.tool_call_ids, edit.where, edit.corrected)
        for version in reversed(history.log())
        for edit in version.edits
        if edit.author == "clear"
    ]
    assert [calls for calls, _, _ in recorded] == [("c1",), ("c2",)]
    assert all(where == "request" for _, where, _ in recorded)
    assert len(history) == 6
    # On another line of history it is another edit.
    history.commit([*state, *user("other")], parent=history.log()[-1])
    request = [dict(message) for message in state]
    version = history.commit(request, edits=[clear(request, 3)])
    assert [edit.tool_call_ids for edit in version.edits if edit.declared] == [("c1",)]


def test_a_declaration_that_nothing_answers_to_is_kept_once() -> None:
    history = committed()
    said = Edit.declare(EditKind.REDACT, message_ids=["m1"], author="policy")
    messages = [*agent_messages(), *user("more")]
    version = history.commit(messages, edits=[said])
    assert [(e.kind, e.corrected, e.message_ids) for e in version.edits] == [
        (EditKind.APPEND, False, ()),
        (EditKind.REDACT, True, ("m1",)),
    ]
    again = Edit.declare(EditKind.REDACT, message_ids=["m1"], author="policy")
    version = history.commit([*messages, *user("and more")], edits=[again])
    assert [e.kind for e in version.edits] == [EditKind.APPEND]
    assert history.commit([*messages, *user("and more")], edits=[again]) is version


def test_messages_made_by_hand_are_checked() -> None:
    with pytest.raises(ContextError, match="Message 1: lone surrogate"):
        committed().commit([Message("user", "a"), Message("user", "\ud800")])


@pytest.mark.parametrize("name", ["author", "checkpoint_id"])
def test_other_texts_are_checked(name: str) -> None:
    history = committed()
    with pytest.raises(ContextError, match=f"{name}: lone surrogate"):
        history.commit(user("a"), **{name: "\ud800"})
    with pytest.raises(ContextError, match="A declared redact edit: lone surrogate"):
        Edit.declare(EditKind.REDACT, author="\ud800")
    assert len(history) == 1


@settings(max_examples=50)
@given(message_lists, message_lists)
def test_every_message_has_its_origin(old: list[dict], new: list[dict]) -> None:
    history = ContextHistory()
    parent, child = history.commit(old), history.commit(new)
    if parent is child:
        return
    origins = predecessors(parent, child)
    assert len(origins) == len(child.messages)
    named = {j for edit in child.edits for j in edit.new_indices}
    for j, sources in enumerate(origins):
        if j not in named:
            (i,) = sources
            assert parent.messages[i].content_hash == child.messages[j].content_hash


@given(message_lists, message_lists)
def test_recognized_messages_are_what_parsing_would_make(
    known: list[dict], given_messages: list[dict]
) -> None:
    known_messages = parse_messages(known)
    mixed = [*given_messages, *known]
    assert parse_messages(recognized(mixed, known_messages)) == parse_messages(mixed)


def test_recognized_messages_are_not_confused_by_equal_looking_values() -> None:
    known = parse_messages([{"role": "user", "content": "1", "name": "n"}])
    for message in (
        {"role": "user", "content": "1", "name": "n", "x": None},
        {"role": "user", "content": ["1"], "name": "n"},
        {"role": "user", "content": "1"},
        {"role": "user", "content": "1", "name": "n", "tool_calls": []},
    ):
        assert recognized([message], known) == [message]
    same = {"role": "user", "content": "1", "name": "n", "id": None}
    assert recognized([same], known)[0] is known[0]
    with pytest.raises(ContextError, match="Message 0, field 'role': is missing"):
        parse_messages(recognized([{"content": "1"}], known))
