from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from patchkv_agents.context import Edit, EditKind, FrozenJson, Message, infer_edits, parse_messages
from patchkv_agents.context.stores.codec import decode_edit, encode_edit
from patchkv_agents.context.versioning.declarations import completed, located, reconcile
from patchkv_agents.errors import ContextError

from .samples import agent_messages

OLD = parse_messages(agent_messages())


def changed(**contents: str) -> tuple[Message, ...]:
    """The sample with other contents, by message id."""
    return tuple(replace(m, content=contents.get(str(m.id), m.content)) for m in OLD)


def reconciled(said: Sequence[Edit], new: Sequence[Message]) -> list[Edit]:
    return reconcile([located(edit, OLD, new) for edit in said], infer_edits(OLD, new))


def test_inferred_records() -> None:
    new = changed(m3="none")
    first, again = infer_edits(OLD, new)[0], infer_edits(OLD, new)[0]
    assert (first.before_hash, first.after_hash) == (OLD[3].content_hash, new[3].content_hash)
    assert not first.declared and not first.forget and first.where == "state"
    assert first.id < again.id and (first.old_index, first.new_index) == (3, 3)
    assert Edit.declare(EditKind.INSERT, new=[2]).old_index is None


def test_completed_records_name_ids_and_calls() -> None:
    new = changed(m3="none")
    (found,) = infer_edits(OLD, new)
    full = completed(found, None, OLD, new)
    assert (full.message_ids, full.tool_call_ids) == (("m3",), ("c1",))
    assert (full.before_hash, full.after_hash) == (found.before_hash, found.after_hash)
    (gone,) = infer_edits(OLD, OLD[:7])
    full = completed(gone, None, OLD, OLD[:7])
    assert (full.message_ids, full.tool_call_ids, full.after_hash) == (("m7",), (), None)


def key(old: Sequence[Message], new: Sequence[Message]) -> str:
    (edit,) = infer_edits(old, new)
    return completed(edit, None, old, new).idempotency_key


def test_idempotency_keys_follow_the_content_not_the_place() -> None:
    new = changed(m3="none")
    added = parse_messages([{"role": "user", "content": "before all others"}])
    assert key(OLD, new) == key((*added, *OLD), (*added, *new))
    assert key(OLD, new) != key(OLD, changed(m3="nil"))
    assert key(OLD, new) != key(OLD, changed(m5="none"))
    # With ids, from what the message was changed does not count: a middleware that clears results
    # anew for each call finds them cleared already.
    assert key(OLD, new) == key(changed(m3="other"), new)


def test_idempotency_keys_without_ids() -> None:
    plain = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    old = parse_messages(plain)
    new = parse_messages([plain[0], {"role": "user", "content": "2"}, plain[2]])
    other = parse_messages([plain[0], plain[1], {"role": "user", "content": "2"}])
    assert key(old, new) == key(old[1:], new[1:])
    assert key(old, new) != key(old, other)


def test_an_idempotency_key_may_be_given() -> None:
    said = Edit.declare(EditKind.OTHER, old=[3], idempotency_key="run-7")
    assert said.idempotency_key == "run-7"
    (edit,) = reconciled([said], changed(m3="none"))
    assert edit.idempotency_key == "run-7"


def test_a_record_survives_json() -> None:
    said = Edit.declare(
        EditKind.REDACT,
        old=[1, 2],
        tool_call_ids=["c1"],
        where="request",
        forget=True,
        metadata={"reason": "é", "n": 1.0},
    )
    assert decode_edit(encode_edit(said)) == said
    assert said.metadata.load() == {"reason": "é", "n": 1.0}
    with pytest.raises(ContextError, match="metadata.x: set is not JSON"):
        Edit.declare(EditKind.OTHER, metadata={"x": {1}})


@pytest.mark.parametrize("names", [{"message_ids": ["m3"]}, {"tool_call_ids": ["c1"]}])
def test_declarations_by_id(names: dict[str, list[str]]) -> None:
    said = Edit.declare(EditKind.REFRESH_EVIDENCE, author="map", **names)
    (edit,) = reconciled([said], changed(m3="none"))
    assert edit.kind is EditKind.REFRESH_EVIDENCE and edit.author == "map"
    assert edit.declared and not edit.corrected
    assert (edit.old_indices, edit.new_indices) == ((3,), (3,))


def test_declarations_of_what_is_not_there_are_errors() -> None:
    new = changed(m3="none")
    with pytest.raises(ContextError, match=r"names old message 8, but the old version has 8"):
        located(Edit.declare(EditKind.DELETE, old=[8]), OLD, new)
    with pytest.raises(ContextError, match=r"names new message -1"):
        located(Edit.declare(EditKind.INSERT, new=[-1]), OLD, new)
    with pytest.raises(ContextError, match=r"'c9', but no message of the old or the new version"):
        located(Edit.declare(EditKind.OTHER, tool_call_ids=["c9"]), OLD, new)
    twice = tuple(replace(m, tool_call_id=m.tool_call_id and "call_0") for m in OLD)
    with pytest.raises(ContextError, match=r"'call_0', which messages 3, 5 have; declare it by"):
        located(Edit.declare(EditKind.OTHER, tool_call_ids=["call_0"]), twice, twice)


@pytest.mark.parametrize(
    ("kind", "arguments", "problem"),
    [
        ("nonsense", {}, "no kind 'nonsense' of edits; use one of replace_tool_result, "),
        ("other", {"scope": "all"}, "scope is 'all', not one of"),
        ("other", {"where": "here"}, "where is 'here', not one of"),
        ("other", {"old": 3}, "a list of indices, not by 3"),
        ("other", {"new": ["c1"]}, "a list of indices"),
        ("other", {"old": [True]}, "a list of indices"),
        ("other", {"message_ids": "m3"}, "a list of ids, not by 'm3'"),
        ("other", {"tool_call_ids": [1]}, "a list of ids"),
        ("other", {"author": 7}, "must be text, not 7"),
        ("other", {"author": "\ud800"}, "lone surrogate"),
    ],
)
def test_declarations_are_checked(kind: str, arguments: dict[str, Any], problem: str) -> None:
    """A kind that does not exist was stored, and the file could not be read any more."""
    with pytest.raises(ContextError, match=problem):
        Edit.declare(kind, **arguments)  # type: ignore[arg-type]


def test_a_kind_may_be_given_by_its_name() -> None:
    assert Edit.declare("redact").kind is EditKind.REDACT  # type: ignore[arg-type]


def test_a_side_that_is_left_out_is_filled_in() -> None:
    for side in ({"old": [3]}, {"new": [3]}):
        (edit,) = reconciled([Edit.declare(EditKind.OTHER, **side)], changed(m3="none"))
        assert (edit.old_indices, edit.new_indices) == ((3,), (3,))
        assert edit.declared and not edit.corrected


def test_several_found_edits_that_are_one_declaration_become_one() -> None:
    """A summary may look like deletions beside an edited message."""
    summary = Message("assistant", "Track 4, behind the kiosk, and so on.")
    new = (*OLD[:2], summary, OLD[7])
    assert len(infer_edits(OLD, new)) > 1
    (edit,) = reconciled([Edit.declare(EditKind.SUMMARIZE, old=range(2, 7), new=[2])], new)
    assert edit.kind is EditKind.SUMMARIZE and not edit.corrected
    assert (edit.old_indices, edit.new_indices) == ((2, 3, 4, 5, 6), (2,))
    (edit,) = reconciled([Edit.declare(EditKind.DELETE, old=[3, 5])], OLD[:3] + OLD[4:5] + OLD[6:])
    assert (edit.kind, edit.old_indices, edit.corrected) == (EditKind.DELETE, (3, 5), False)


def test_a_kind_that_can_be_seen_to_be_wrong_is_corrected() -> None:
    for kind in (EditKind.APPEND, EditKind.MOVE, EditKind.REWRITE_SYSTEM):
        (edit,) = reconciled([Edit.declare(kind, old=[3], new=[3])], changed(m3="none"))
        assert edit.kind is EditKind.REPLACE_TOOL_RESULT
        assert edit.declared and edit.corrected
    # An intent cannot be seen, and a more general name is no error.
    same_values = changed(m3='{"track":4}')
    for kind in (EditKind.REVISE_PLAN, EditKind.REPLACE_TOOL_RESULT, EditKind.RESERIALIZE):
        (edit,) = reconciled([Edit.declare(kind, old=[3], new=[3])], same_values)
        assert edit.kind is kind and not edit.corrected


def test_an_appended_message_may_revise_the_plan_but_not_be_a_summary() -> None:
    new = (*OLD, Message("tool", "The plan is now: go.", tool_call_id="call_9"))
    (edit,) = reconciled([Edit.declare(EditKind.REVISE_PLAN, new=[len(OLD)])], new)
    assert (edit.kind, edit.corrected) == (EditKind.REVISE_PLAN, False)
    (edit,) = reconciled([Edit.declare(EditKind.SUMMARIZE, new=[len(OLD)])], new)
    assert (edit.kind, edit.corrected) == (EditKind.APPEND, True)


def test_a_message_that_says_something_else_was_not_deleted() -> None:
    new = changed(m6="We have no information about trains.")
    (edit,) = reconciled([Edit.declare(EditKind.DELETE, old=[6])], new)
    assert (edit.kind, edit.new_indices, edit.corrected) == (EditKind.OTHER, (6,), True)
    (edit,) = reconciled([Edit.declare(EditKind.DELETE, old=[6], partial=True)], new)
    assert (edit.kind, edit.corrected) == (EditKind.DELETE, False)


def test_a_swap_of_neighbours_may_be_told_either_way() -> None:
    new = (*OLD[:5], OLD[6], OLD[5], OLD[7])
    for old_index, new_index in ((5, 6), (6, 5)):
        said = Edit.declare(EditKind.MOVE, old=[old_index], new=[new_index])
        (edit,) = reconciled([said], new)
        assert edit.kind is EditKind.MOVE and edit.declared and not edit.corrected


def test_declarations_that_miss_are_marked_not_lost() -> None:
    said = [
        Edit.declare(EditKind.REFRESH_EVIDENCE, old=[4, 5], new=[4, 5]),
        Edit.declare(EditKind.REDACT, old=[1], new=[1], forget=True),
    ]
    evidence, redaction = reconciled(said, changed(m5="Track 4 moved."))
    assert (evidence.old_indices, evidence.corrected) == ((5,), True)
    assert (redaction.old_indices, redaction.forget, redaction.corrected) == ((), True, True)


def test_two_declarations_for_one_message_both_count() -> None:
    said = [
        Edit.declare(EditKind.REFRESH_EVIDENCE, old=[5], author="map"),
        Edit.declare(EditKind.REDACT, new=[5], forget=True, partial=True),
    ]
    (edit,) = reconciled(said, changed(m5="Track 4 moved."))
    assert (edit.kind, edit.author) == (EditKind.REFRESH_EVIDENCE, "map")
    assert edit.forget and edit.partial and not edit.corrected


def test_tools_are_declared_by_scope() -> None:
    found = Edit("e", EditKind.REORDER, scope="tools", before_hash="a", after_hash="b")
    said = Edit.declare(EditKind.REORDER, scope="tools", author="me", metadata={"a": 1})
    (edit,) = reconcile([said], [found])
    assert (edit.author, edit.before_hash, edit.corrected) == ("me", "a", False)
    assert edit.metadata == FrozenJson('{"a": 1}')
