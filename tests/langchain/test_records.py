from __future__ import annotations

from typing import Any

import pytest
from langchain.agents.middleware import ClearToolUsesEdit
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages

from patchkv_agents import ContextHistory, EditKind
from patchkv_agents.context import Edit, from_langchain
from patchkv_langchain.agent_threads import AgentThread
from patchkv_langchain.notes import Note, model_call, note, noted
from patchkv_langchain.records import changes_between, declared_edits, tracked
from tests.langchain.agents import OPENING_HOURS

CONVERSATION: list[BaseMessage] = [
    SystemMessage("You guide visitors.", id="m0"),
    HumanMessage("When is the museum open, and what is in room 4?", id="m1"),
    AIMessage("", tool_calls=[{"id": "c1", "name": "hours", "args": {"of": "museum"}}], id="m2"),
    ToolMessage(OPENING_HOURS, tool_call_id="c1", name="hours", id="m3"),
    AIMessage("", tool_calls=[{"id": "c2", "name": "room", "args": {"number": 4}}], id="m4"),
    ToolMessage("Clocks of the 18th century.", tool_call_id="c2", name="room", id="m5"),
    AIMessage("Nine to five; and clocks.", id="m6"),
    HumanMessage("Thank you. And on Mondays?", id="m7"),
]


def committed(new: list[BaseMessage], old: list[BaseMessage] = CONVERSATION) -> tuple[Edit, ...]:
    """The edits in the history of one who was shown `old` and then `new`."""
    history = ContextHistory()
    history.commit(from_langchain(old, keep="shown"))
    before = history.head.messages
    version = history.commit(from_langchain(new, keep="shown"), edits=declared_edits(before, new))
    return version.edits


def told(edits: tuple[Edit, ...]) -> list[tuple[Any, ...]]:
    assert not any(edit.corrected for edit in edits), "a declaration did not fit"
    return [
        (e.kind.value, e.old_indices, e.new_indices, e.author, e.where)
        for e in edits
        if e.kind is not EditKind.APPEND or e.declared
    ]


def changed(index: int, message: BaseMessage) -> list[BaseMessage]:
    return [*CONVERSATION[:index], message, *CONVERSATION[index + 1 :]]


def test_cleared_tool_results_and_arguments() -> None:
    new = list(CONVERSATION)
    clear = ClearToolUsesEdit(trigger=0, keep=1, clear_tool_inputs=True)
    clear.apply(new, count_tokens=lambda messages: 1)
    edits = committed(new)
    assert told(edits) == [
        ("delete", (2,), (2,), "ContextEditingMiddleware", "request"),
        ("replace_tool_result", (3,), (3,), "ContextEditingMiddleware", "request"),
    ]
    assert [edit.metadata.load()["reason"] for edit in edits] == [
        "clear_tool_inputs",
        "clear_tool_uses",
    ]
    assert edits[0].partial and edits[1].tool_call_ids == ("c1",)


def test_what_was_cleared_before_is_no_edit() -> None:
    new = list(CONVERSATION)
    ClearToolUsesEdit(trigger=0, keep=1).apply(new, count_tokens=lambda messages: 1)
    assert told(committed(new, old=new)) == []


def test_summary_stands_for_the_whole_range() -> None:
    summary = HumanMessage(
        "Here is a summary: open nine to five.", additional_kwargs={"lc_source": "summarization"}
    )
    for kept in (1, 2, 4):
        new = [CONVERSATION[0], summary, *CONVERSATION[-kept:]]
        replaced = tuple(range(1, len(CONVERSATION) - kept))
        assert told(committed(new)) == [
            ("summarize", replaced, (1,), "SummarizationMiddleware", "state")
        ]


def test_summary_that_quotes_what_it_replaces_is_still_one_edit() -> None:
    """Inference sees a message that was moved up, and deletions; the record knows better."""
    summary = HumanMessage(
        CONVERSATION[6].text, additional_kwargs={"lc_source": "summarization"}, id="s"
    )
    edits = committed([CONVERSATION[0], summary, CONVERSATION[7]])
    assert told(edits) == [
        ("summarize", (1, 2, 3, 4, 5, 6), (1,), "SummarizationMiddleware", "state")
    ]


def test_messages_added_behind_a_summary_are_no_part_of_it() -> None:
    summary = HumanMessage("In short: ...", additional_kwargs={"lc_source": "summarization"})
    more = AIMessage("Closed.", id="m8")
    edits = committed([CONVERSATION[0], summary, CONVERSATION[7], more])
    assert [(e.kind.value, e.new_indices) for e in edits] == [("summarize", (1,)), ("append", (3,))]


def test_summary_before_new_messages_that_resemble_those_it_replaced() -> None:
    """They were taken for what was there; by the ids of their calls they are others."""
    summary = HumanMessage("In short: ...", additional_kwargs={"lc_source": "summarization"})
    call = {"id": "c3", "name": "room", "args": {"number": 5}}
    more = [
        AIMessage("", tool_calls=[call], id="m8"),
        ToolMessage("Clocks of the 19th century.", tool_call_id="c3", name="room", id="m9"),
    ]
    edits = committed([CONVERSATION[0], summary, *more], CONVERSATION[:6])
    assert [
        (edit.kind.value, edit.author, edit.old_indices, edit.new_indices) for edit in edits
    ] == [
        ("summarize", "SummarizationMiddleware", (1, 2, 3, 4, 5), (1,)),
        ("append", None, (), (2,)),
        ("append", None, (), (3,)),
    ]
    assert not any(edit.corrected for edit in edits)


def test_two_summaries_in_a_row_are_told_once() -> None:
    parts = [
        HumanMessage(f"In short, part {n}: ...", additional_kwargs={"lc_source": "summarization"})
        for n in range(2)
    ]
    edits = committed([CONVERSATION[0], *parts, *CONVERSATION[-1:]])
    named = [index for edit in edits for index in (*edit.old_indices, *edit.new_indices)]
    assert sorted(named) == [1, 1, 2, 2, 3, 4, 5, 6]
    assert not any(edit.corrected for edit in edits)
    assert {edit.author for edit in edits} == {"SummarizationMiddleware"}


def test_a_message_that_came_cleared_was_not_cleared_by_an_edit() -> None:
    cleared = ToolMessage(
        "[cleared]",
        tool_call_id="c3",
        response_metadata={"context_editing": {"cleared": True, "strategy": "clear_tool_uses"}},
    )
    (edit,) = committed([*CONVERSATION, cleared])
    assert (edit.kind, edit.author, edit.declared) == (EditKind.APPEND, None, False)


def test_todo_list_is_a_plan_revised() -> None:
    call = AIMessage("", tool_calls=[{"id": "t1", "name": "write_todos", "args": {"todos": []}}])
    result = ToolMessage("Updated todo list to []", tool_call_id="t1", id="m9")
    edits = committed([*CONVERSATION, call, result])
    assert told(edits) == [("revise_plan", (), (9,), "TodoListMiddleware", "state")]


def test_langmem_summary_by_its_prompt() -> None:
    summary = SystemMessage("Summary of the conversation so far: open nine to five.")
    edits = committed([CONVERSATION[0], summary, *CONVERSATION[-2:]])
    assert told(edits) == [("summarize", (1, 2, 3, 4, 5), (1,), "SummarizationNode", "state")]


def test_truncated_arguments() -> None:
    write = {"id": "c1", "name": "write_file", "args": {"path": "a.md", "content": OPENING_HOURS}}
    cut = {**write, "args": {"path": "a.md", "content": OPENING_HOURS[:20] + "...(truncated)"}}
    old = changed(2, AIMessage("", tool_calls=[write], id="m2"))
    new = changed(2, AIMessage("", tool_calls=[cut], id="m2"))
    assert told(committed(new, old)) == [
        ("delete", (2,), (2,), "SummarizationMiddleware", "request")
    ]
    other = {**write, "args": {"path": "a.md", "content": "Something else."}}
    (edit,) = committed(changed(2, AIMessage("", tool_calls=[other], id="m2")), old)
    assert edit.author is None and not edit.declared


def test_evicted_content() -> None:
    preview = HumanMessage(
        "Message content too large ...", id="m1", additional_kwargs={"lc_evicted_to": "/m1.md"}
    )
    assert told(committed(changed(1, preview))) == [
        ("delete", (1,), (1,), "FilesystemMiddleware", "request")
    ]
    stub = "Tool result too large, the result of this tool call c1 was saved in ..."
    clipped = ToolMessage(stub, tool_call_id="c1", name="hours", id="m3")
    assert told(committed(changed(3, clipped))) == [
        ("replace_tool_result", (3,), (3,), "SummarizationMiddleware", "state")
    ]


def test_stamp_of_any_program() -> None:
    stamp = {"patchkv_edit": {"kind": "refresh_evidence", "author": "refresh", "reason": "stale"}}
    fresh = ToolMessage(
        "Open from ten.", tool_call_id="c1", name="hours", id="m3", response_metadata=stamp
    )
    (edit,) = committed(changed(3, fresh))
    assert told((edit,)) == [("refresh_evidence", (3,), (3,), "refresh", "state")]
    assert edit.metadata.load() == {"reason": "stale"}


@pytest.mark.parametrize(
    "metadata",
    [
        {"patchkv_edit": "refresh"},
        {"patchkv_edit": {"kind": "nonsense", "author": 7, "reason": []}},
        {"context_editing": True},
        {"context_editing": {"cleared": None}},
    ],
)
def test_records_that_make_no_sense_name_nothing(metadata: dict[str, Any]) -> None:
    fresh = ToolMessage("Open from ten.", tool_call_id="c1", id="m3", response_metadata=metadata)
    (edit,) = committed(changed(3, fresh))
    assert (edit.kind, edit.author) == (EditKind.REPLACE_TOOL_RESULT, None)


def test_messages_that_cannot_be_compared_are_left_to_inference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = from_langchain(CONVERSATION, keep="shown")
    removing: list[Any] = [*CONVERSATION, RemoveMessage(id="m1")]
    assert declared_edits(before, removing) == ()
    assert "by comparison alone" in caplog.text


def test_kind_that_is_seen_to_be_wrong_gives_way() -> None:
    """A declaration must fit what was found, or the history would mark it as corrected."""
    moved = [*CONVERSATION[:4], CONVERSATION[6], *CONVERSATION[4:6], CONVERSATION[7]]
    notes = changes_between(CONVERSATION, moved, author="sorter", kind=EditKind.REWRITE_SYSTEM)
    with model_call(notes):
        edits = committed(moved)
    assert edits and {edit.author for edit in edits} == {"sorter"}
    assert not any(edit.corrected for edit in edits)


def test_removed_messages_are_attributed_to_the_update_that_removed_them() -> None:
    update = [RemoveMessage(id="m4"), RemoveMessage(id="m5")]
    after = add_messages(CONVERSATION, update)
    with model_call(changes_between(CONVERSATION, after, author="forgetful")):
        edits = committed(after)
    assert told(edits) == [
        ("delete", (4,), (), "forgetful", "state"),
        ("delete", (5,), (), "forgetful", "state"),
    ]


def test_everything_rewritten_by_remove_all() -> None:
    fresh = CONVERSATION[3].model_copy(update={"content": "Open from ten."})
    rewritten = [RemoveMessage(REMOVE_ALL_MESSAGES), *changed(3, fresh)[:6], CONVERSATION[7]]
    after = add_messages(CONVERSATION, rewritten)
    with model_call(changes_between(CONVERSATION, after, author="rewriter")):
        edits = committed(after)
    assert told(edits) == [
        ("replace_tool_result", (3,), (3,), "rewriter", "state"),
        ("delete", (6,), (), "rewriter", "state"),
    ]


def test_a_removal_is_known_by_name_where_the_model_saw_another_form() -> None:
    """The request showed a cleared result; the state, from which it then went, the whole one."""
    cleared = list(CONVERSATION)
    ClearToolUsesEdit(trigger=0, keep=1).apply(cleared, count_tokens=lambda messages: 1)
    after = [*CONVERSATION[:2], *CONVERSATION[4:]]
    with model_call(changes_between(CONVERSATION, after, author="forgetful")):
        edits = committed(after, old=cleared)
    assert {edit.author for edit in edits} == {"forgetful"}


def test_trimming_is_noted_by_a_tracked_function() -> None:
    def trim_in_a_node() -> tuple[list[BaseMessage], tuple[Edit, ...]]:
        trimmed = tracked(trim_messages)(
            CONVERSATION,
            max_tokens=4,
            token_counter=len,
            strategy="last",
            include_system=True,
        )
        return trimmed, committed(trimmed)

    before = noted()
    trimmed, edits = in_a_context_of_its_own(trim_in_a_node)
    assert [m.id for m in trimmed] == ["m0", "m5", "m6", "m7"]
    assert told(edits) == [("delete", (i,), (), "trim_messages", "request") for i in (1, 2, 3, 4)]
    assert noted() == before


def test_the_last_note_counts() -> None:
    fresh = CONVERSATION[3].model_copy(update={"content": "Open from ten."})
    new = changed(3, fresh)
    (first,) = changes_between(CONVERSATION, new, author="first")
    (second,) = changes_between(CONVERSATION, new, author="second", where="request")
    with model_call([first, second]):
        (edit,) = committed(new)
    assert (edit.author, edit.where) == ("second", "request")
    assert noted() == (), "notes of a model call end with it"


def test_a_note_made_again_counts_once() -> None:
    def answer(number: int) -> tuple[Note, ...]:
        new = changed(7, HumanMessage(f"And on day {number}?", id="m7"))
        return changes_between(CONVERSATION, new, author="counter")

    known = AgentThread()
    known.note(answer(0))
    for _ in range(300):
        known.note(answer(1))
    assert [*known.notes] == [*answer(0), *answer(1)]


def test_notes_are_about_content_not_about_place() -> None:
    fresh = CONVERSATION[3].model_copy(update={"content": "Open from ten."})
    notes = changes_between(CONVERSATION, changed(3, fresh), author="refresh")
    shifted = [CONVERSATION[0], SystemMessage("Be brief."), *changed(3, fresh)[1:]]
    with model_call(notes):
        edits = committed(shifted)
    assert [(e.kind.value, e.new_indices, e.author) for e in edits] == [
        ("insert", (1,), None),
        ("replace_tool_result", (4,), "refresh"),
    ]


def test_equal_lists_have_no_changes() -> None:
    copies = [message.model_copy(deep=True) for message in CONVERSATION]
    assert changes_between(CONVERSATION, copies, author="nobody") == ()


def test_notes_are_bounded() -> None:
    def many() -> int:
        for number in range(300):
            new = changed(7, HumanMessage(f"And on day {number}?", id="m7"))
            note(changes_between(CONVERSATION, new, author="counter"))
        return len(noted())

    assert in_a_context_of_its_own(many) == 256


def in_a_context_of_its_own(function: Any) -> Any:
    import contextvars

    return contextvars.copy_context().run(function)
