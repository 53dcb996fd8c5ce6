"""Branches of one thread: what a version may take over, and which one it goes on from.

The model has random weights: whatever of a context reaches the rows shows in the logits.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from patchkv_agents.context import ContextHistory, MemoryHistoryStore
from patchkv_agents.context.edits import Edit, EditKind
from patchkv_agents.context.lineage.ancestry import Ancestors
from patchkv_agents.engine import Engine
from patchkv_agents.engine.branches import MAX_VERSIONS, RowVersions
from patchkv_agents.recovery import Blocks, RecoveryPolicy, Window
from patchkv_agents.recovery.plan import RecoveryPlan, RowLabel

PATCH = RecoveryPolicy("patch", Window(16, tail_tokens=16, block_size=32, rule=Blocks(0.05)))


def message(role, content):
    return {"role": role, "content": content}


PAGE = "The museum opens at nine, and the ferry leaves at ten. " * 12
BEGUN = [
    message("system", "You answer from the notes."),
    message("user", "Read this."),
    message("assistant", "I have read it."),
    message("user", "Notes of Monday. " + PAGE),
]
EDITED = [*BEGUN[:1], message("user", "Read this with great care, please."), *BEGUN[2:]]
ANSWERED = [*EDITED, message("assistant", "Done.")]
LEFT = [*ANSWERED, message("user", "Go left. " + PAGE * 2), message("assistant", "Left it is.")]
LEFT_ON = [*LEFT, message("user", "And now?")]
RIGHT = [*ANSWERED, message("user", "Go right, and look. " + PAGE * 2)]


def play(thread, turns, *, suspend=False, **options):
    reply = None
    for turn in turns:
        reply = thread.generate(turn, policy=PATCH, max_new_tokens=2, **options)
        if suspend:
            thread.suspend()
    return reply


@pytest.mark.parametrize("suspend", [False, True], ids=["live", "suspended"])
def test_a_branch_is_what_its_own_line_made(engine, thread, suspend):
    """A fork under one thread id took over the stale rows of the turn that it had left, and those
    with which that was computed."""
    alone = engine.thread("alone")
    expected = play(alone, [BEGUN, EDITED, RIGHT], suspend=suspend)
    engine.drop("alone")
    assert expected.report.restored > 0  # the branch has stale rows of its own past
    reply = play(thread, [BEGUN, EDITED, LEFT[:-1], LEFT_ON, RIGHT], suspend=suspend)
    torch.testing.assert_close(reply.first_logits, expected.first_logits, atol=1e-5, rtol=0)
    assert reply.report.restored == expected.report.restored
    assert reply.report.new == expected.report.new
    line = [version.messages[-1].text for version in thread.history.log()]
    assert line == [turn[-1]["content"] for turn in (RIGHT, EDITED, BEGUN)]


def test_both_branches_go_on_where_they_were(thread):
    left = play(thread, [BEGUN, EDITED, LEFT[:-1], LEFT_ON])
    thread.suspend()
    right = play(thread, [RIGHT])
    further = [*LEFT_ON, message("assistant", "Yes."), message("user", "And then?")]
    back = play(thread, [further])
    assert thread.history.head.parents == (left.version_id,)
    assert back.report.new < 40  # what the left branch had is still its own
    assert len(thread.history.branches()) == 2
    again = play(thread, [RIGHT])
    assert thread.history.head.id == right.version_id == again.version_id and again.edits == ()


def test_a_turn_that_is_asked_again_goes_back_to_its_version(thread):
    first = play(thread, [BEGUN, EDITED])
    play(thread, [LEFT[:-1], LEFT_ON])
    again = play(thread, [EDITED])
    assert again.version_id == first.version_id == thread.history.head.id
    assert again.report.resumed_from is not None and again.report.new == 0


def test_a_branch_of_another_process_is_found_by_its_messages(engine):
    """Its state is gone, but not what came from what."""
    histories = MemoryHistoryStore()
    model = engine.adapter.model, engine.tokenizer
    first = Engine(*model, history=histories).thread("t")
    left = play(first, [BEGUN, EDITED, LEFT[:-1], LEFT_ON])
    right = play(first, [RIGHT])
    second = Engine(*model, history=histories).thread("t")
    play(second, [[*RIGHT, message("assistant", "Right."), message("user", "And now?")]])
    assert second.history.head.parents == (right.version_id,)
    play(second, [[*LEFT_ON, message("assistant", "Left."), message("user", "And now?")]])
    assert second.history.head.parents == (left.version_id,)


def test_linear_edits_stay_linear_and_lose_nothing(thread):
    """What an agent does to its one line: refresh, clear, drop, toggle, summarise, and go on."""
    refreshed = [*EDITED[:3], message("user", "Notes of Tuesday. " + PAGE)]
    turns = [
        BEGUN,
        EDITED,
        [*EDITED, message("assistant", "Done."), message("user", "And?")],
        [*refreshed, message("assistant", "Done."), message("user", "And?")],
        [*EDITED, message("assistant", "Done."), message("user", "And?")],  # toggled back
        [*EDITED[:1], message("user", "Summary so far. " + PAGE), message("user", "And?")],
    ]
    for turn in turns:
        thread.generate(turn, policy=PATCH, max_new_tokens=2)
    assert [len(v.parents) for v in thread.history.log()] == [1, 1, 1, 1, 1, 0]
    assert list(thread.history.branches()) == ["main"]
    assert all(version.edits for version in thread.history.log()[:-1])


def test_the_caller_may_name_the_parent(thread):
    play(thread, [BEGUN, EDITED])
    edited = thread.history.head
    play(thread, [LEFT[:-1]])
    other = [*ANSWERED, message("user", "Go left. " + PAGE)]  # as like an edit as can be
    reply = play(thread, [other], parent=edited, checkpoint_id="c7")
    assert thread.history.head.parents == (edited.id,)
    assert thread.history.head.checkpoint_id == "c7"
    assert reply.report.new > 150  # nothing of the sibling's page


def test_declared_edits_are_of_the_version_before(thread):
    play(thread, [BEGUN, EDITED, LEFT[:-1], LEFT_ON])
    before = thread.history.head
    said = Edit.declare(EditKind.DELETE, author="janitor")
    thread.generate(EDITED, edits=[said], max_new_tokens=1)
    assert thread.history.head.parents == (before.id,)
    assert "janitor" in {edit.author for edit in thread.history.head.edits}


def test_rows_belong_to_the_version_that_computed_them():
    def plan(labels, aligned):
        return RecoveryPlan(np.array(labels, np.int8), np.array(aligned), prefix=0)

    new, kept = int(RowLabel.NEW), int(RowLabel.RESTORED)
    rows = RowVersions()
    rows.note("a", plan([new] * 4, [-1] * 4), None)
    rows.note("b", plan([kept, new, kept, new], [0, -1, 2, -1]), "a")
    rows.note("c", plan([kept, kept, kept, kept], [1, 2, 3, 4]), "b")  # 4: appended to b
    assert rows.own("c", 5, {"a"}).tolist() == [False, True, False, False, False]
    assert rows.own("c", 5, {"b"}).tolist() == [True, False, True, True, False]
    assert rows.own("b", 2, {"a", "c"}).tolist() == [True, False]
    assert rows.own("unknown", 2, {"a"}).tolist() == [False, False]
    rows.note("b", plan([kept] * 4, [0, 1, 2, 3]), "a")  # what it computed may still be stored
    assert rows.own("b", 4, {"a"}).tolist() == [True, False, True, False]


def test_ancestors_are_found_anew_where_the_line_changes(thread):
    play(thread, [BEGUN, EDITED, LEFT[:-1]])
    play(thread, [RIGHT], parent=thread.history.log()[1])
    base, edited, left, right = map(thread.history.get, thread.history.version_ids())
    ancestors = Ancestors()
    for version, expected in [
        (base, {base.id}),
        (edited, {base.id, edited.id}),
        (right, {base.id, edited.id, right.id}),
        (left, {base.id, edited.id, left.id}),
    ]:
        assert ancestors.of(thread.history, version) == expected


def test_a_long_thread_costs_no_more_at_each_version():
    """5,000 versions: what is kept for them is bounded, and none lists the others. A number was
    kept for every version, and asking whether a history has one listed all ids."""
    listed, loaded = [], []

    class Counting(MemoryHistoryStore):
        def version_ids(self, thread):
            listed.append(thread)
            return super().version_ids(thread)

        def load(self, thread, version_id):
            loaded.append(version_id)
            return super().load(thread, version_id)

    history = ContextHistory(Counting())
    rows, ancestors = RowVersions(), Ancestors()
    plan = RecoveryPlan(
        np.array([RowLabel.RESTORED] * 3 + [RowLabel.NEW], np.int8), np.arange(4), prefix=0
    )
    before, costs = None, []
    for step in range(5_000):
        version = history.commit([message("user", f"turn {step}")])
        loaded.clear()
        branch = ancestors.of(history, version)
        if before is not None:
            assert before in history
            assert rows.own(before, 4, branch).all()
        rows.note(version.id, plan, before)
        costs.append(len(loaded))
        before = version.id
    assert len(history) == 5_000 and len(listed) == 1
    assert max(costs) <= 2 and len(rows) <= 4 * MAX_VERSIONS
    assert rows.own(history.head.parents[0], 4, {history.head.id}).tolist() == [False] * 4
