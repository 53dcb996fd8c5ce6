"""What is remembered of a server's requests, and what is not."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from patchkv_agents.context import Edit, EditKind, ThreadKey
from patchkv_agents.recovery import RecoveryPolicy
from patchkv_agents.recovery.plan import RecoveryPlan, RowLabel
from patchkv_server.activity import MAX_ANSWERS, MAX_EDITS, MAX_THREADS
from patchkv_server.savings import FEWEST_ROWS, SavingsEstimate
from patchkv_server.strips import KINDS, MAX_RUNS, counts, strip

from ..engine.models import tiny_engine
from .scripted import SECRET, Scripted, conversation

LATE = "is cancelled, and the next one goes at 8:10"


@pytest.fixture
def engine(smollm2_tokenizer):
    return tiny_engine(smollm2_tokenizer, max_tokens=4096)


@pytest.fixture
def served(engine):
    with_activity = Scripted(engine)
    yield with_activity
    with_activity.activity.close()


def plan_of(labels, prefix=0):
    labels = np.array(labels, dtype=np.int8)
    return RecoveryPlan(labels, np.full(len(labels), -1), prefix)


def test_scripted_requests(served):
    """A first request, the same again, a tool result replaced, a turn appended, state lost."""
    served.ask(conversation())
    served.ask(conversation())
    served.ask(conversation(train=LATE))
    served.ask(conversation(train=LATE, turns=13))
    served.engine.thread("trip", namespace="a").clear()
    served.ask(conversation(train=LATE, turns=14))
    number = served.state()["threads"][0]["number"]
    state = served.state(selected=number)

    lost, appended, replaced, again, first = state["selected"]["answers"]
    assert [answer["number"] for answer in (first, again, replaced)] == [1, 2, 3]
    prompt = first["tokens"]["new"]
    assert first["tokens"] == {"exact": 0, "new": prompt, "recomputed": 0, "restored": 0}
    assert first["strip"] == ((KINDS.index("new"), prompt),)
    assert first["edits"] == () and first["miss"] is None
    assert again["tokens"]["exact"] == prompt - 1 and again["edits"] == ()
    assert again["miss"] is None and again["is_exact"]

    assert replaced["tokens"]["restored"] > 0 and not replaced["is_exact"]
    (edit,) = replaced["edits"]
    assert edit["kind"] == "replace_tool_result" and not edit["declared"]
    assert edit["old_indices"] == edit["new_indices"] == [1]
    miss = replaced["miss"]
    assert miss["cause"] == "result_replaced" and miss["field"] == "content"
    assert (miss["message"], miss["role"]) == (1, "tool")
    total = sum(replaced["tokens"].values())
    assert miss["prefix"] + miss["lost"] == total and 0 < miss["prefix"] < 60
    assert "Append the fresh result" in miss["remedy"] and miss["excerpts"] is None

    assert [edit["kind"] for edit in appended["edits"]] == ["append", "append"]
    assert appended["miss"] is None
    assert lost["miss"]["cause"] == "no_state"
    assert lost["miss"]["lost"] == lost["tokens"]["new"] == sum(lost["tokens"].values())

    (overview,) = state["threads"]
    assert (overview["name"], overview["tenant"], overview["place"]) == ("trip", "a", "live")
    assert overview["answers"] == state["totals"]["answers"] == 5
    assert overview["cause"] == "no_state" and overview["tokens"] == lost["tokens"]
    sums = {kind: sum(a["tokens"][kind] for a in state["selected"]["answers"]) for kind in KINDS}
    assert state["totals"]["tokens"] == sums
    assert state["queue"] == {"waiting": 0, "running": 1}
    assert state["memory"]["store_bytes"] is None


def test_strip_has_the_place_of_each_token(served):
    served.ask(conversation())
    served.ask(conversation(train=LATE))
    (replaced, _) = served.state(selected=1)["selected"]["answers"]
    runs = [(KINDS[kind], tokens) for kind, tokens in replaced["strip"]]
    assert runs[0][0] == "exact" and "new" in (runs[1][0], runs[2][0])
    for kind in KINDS:
        assert sum(n for name, n in runs if name == kind) == replaced["tokens"][kind]


def test_no_text_of_a_context_without_the_flag(served):
    served.ask(conversation())
    served.ask(conversation(train=LATE))
    everything = json.dumps(served.state(selected=1)) + served.metrics.total.text().decode()
    for text in (SECRET, "York", "cancelled", "8:10", "morning"):
        assert text not in everything


def test_excerpts_with_the_flag_until_they_are_to_be_forgotten(engine):
    """Both sides of an edit are quoted; an edit that says forget takes all quotes of its tenant,
    since the text may be in any, and is not quoted itself."""
    served = Scripted(engine, log_content=True)
    served.ask(conversation())
    served.ask(conversation(train=LATE))
    served.ask(conversation(), tenant="b")
    served.ask(conversation(train=LATE), tenant="b")
    excerpts = served.state(selected=1)["selected"]["answers"][0]["miss"]["excerpts"]
    assert SECRET in excerpts["old"] and "cancelled" in excerpts["new"]
    redact = Edit.declare(EditKind.REDACT, old=[1], new=[1], forget=True)
    served.ask(conversation(train="[gone]"), edits=[redact])
    newest, before, _ = served.state(selected=1)["selected"]["answers"]
    assert newest["edits"][0]["forget"] and newest["miss"]["cause"] == "redacted"
    assert newest["miss"]["excerpts"] is None and before["miss"]["excerpts"] is None
    assert before["miss"]["cause"] == "result_replaced"
    assert served.state(selected=2)["selected"]["answers"][0]["miss"]["excerpts"] is not None
    served.activity.close()


def test_tenants_see_their_own_threads(served):
    served.ask(conversation(), tenant="a")
    served.ask(conversation(), "other", tenant="b")
    of_b = served.activity.state(served.gauges, "b", selected=1)  # the first one is a's
    assert [thread["name"] for thread in of_b["threads"]] == ["other"]
    assert of_b["selected"] is None and of_b["totals"]["answers"] == 1
    assert "trip" not in json.dumps(of_b)
    assert len(served.state()["threads"]) == 2
    assert served.state(tenant="nobody")["threads"] == []


def test_what_is_kept_is_bounded(served):
    """200 threads and more, long histories, edits of many messages: the newest are told."""
    changed = conversation(turns=20)
    served.ask(changed, "long", max_new_tokens=1)
    seen = served.engine.observer
    answers = []
    served.engine.observer = answers.append
    for index in range(2, 40, 3):
        changed[index] = {**changed[index], "content": f"Something else {index}."}
    served.ask(changed, "long", max_new_tokens=1)
    (answered,) = answers
    assert len(answered.edits) > MAX_EDITS
    seen(answered)
    for index in range(MAX_THREADS + 20):
        key = ThreadKey(f"chat {index} " + "x" * 200, "a")
        seen(replace(answered, thread=key))
    seen(answered)
    state = served.state()
    assert len(state["threads"]) == MAX_THREADS
    newest, second = state["threads"][:2]
    assert (newest["name"], newest["answers"]) == ("long", 1)  # it had been dropped meanwhile
    assert 0 < len(second["name"]) < 100
    for _ in range(MAX_ANSWERS + 10):
        seen(answered)
    chosen = served.state(selected=newest["number"])["selected"]["answers"]
    assert len(chosen) == MAX_ANSWERS and chosen[0]["number"] == MAX_ANSWERS + 11
    assert len(chosen[0]["edits"]) == MAX_EDITS
    assert chosen[0]["edits_left_out"] == len(answered.edits) - MAX_EDITS
    assert len(json.dumps(served.state(selected=newest["number"]))) < 300_000


def test_long_strips_are_simplified():
    """Runs beyond the bound are summed in cells; the tokens stay as many."""
    labels = [RowLabel.PREFIX] * 500 + [RowLabel.NEW, RowLabel.RESTORED, RowLabel.RESTORED] * 200
    plan = plan_of(labels)
    runs = strip(plan)
    assert len(runs) <= MAX_RUNS and sum(tokens for _, tokens in runs) == len(labels)
    assert runs[0][0] == KINDS.index("exact") and 480 < runs[0][1] < 520
    assert runs[1][0] == KINDS.index("restored")
    assert counts(plan) == {"exact": 500, "new": 200, "recomputed": 0, "restored": 400}
    short = plan_of([RowLabel.PREFIX, RowLabel.NEW, RowLabel.WINDOW, RowLabel.TAIL])
    assert strip(short) == ((0, 1), (1, 1), (2, 2))


def answer(labels, prefix, *, recompute_ms=0.0, planning_ms=0.0, restore_ms=0.0):
    times = {"recompute_ms": recompute_ms, "planning_ms": planning_ms, "restore_ms": restore_ms}
    return SimpleNamespace(plan=plan_of(labels, prefix), report=SimpleNamespace(**times))


def test_saved_time_is_rows_that_did_not_run():
    """Restored rows behind the prefix, at the measured rate, less what recovery cost. Rows in front
    of the edit are no saving: a prefix cache has them as well."""
    estimate = SavingsEstimate()
    labels = [RowLabel.RESTORED] * 10 + [RowLabel.NEW] * 2 + [RowLabel.RESTORED] * 100
    resumed = answer(labels, prefix=10, planning_ms=3, restore_ms=7)
    assert estimate.saved(resumed) == (100, None)  # nothing is measured yet
    estimate.measure(answer([RowLabel.NEW] * (FEWEST_ROWS - 1), 0, recompute_ms=1e6))
    assert estimate.ms_per_row is None  # too few rows to tell
    estimate.measure(answer([RowLabel.NEW] * 100, 0, recompute_ms=200))
    assert estimate.ms_per_row == 2
    assert estimate.saved(resumed) == (100, 190)
    estimate.measure(answer([RowLabel.NEW] * 100, 0, recompute_ms=20_000))  # others had their turns
    assert estimate.ms_per_row == pytest.approx(51.5)
    slow = answer(labels, prefix=10, restore_ms=1e5)
    assert estimate.saved(slow)[1] < 0
    assert estimate.saved(answer([RowLabel.NEW] * 3, 0)) == (0, 0.0)


def test_a_render_that_fails_leaves_no_explanation(served, monkeypatch, caplog):
    """The message of what failed is not logged: it may quote the context."""
    served.ask(conversation())

    def failing(*_args, **_kwargs):
        raise ValueError(SECRET)

    monkeypatch.setattr("patchkv_server.activity.render", failing)
    served.ask(conversation(train=LATE))
    assert served.state(selected=1)["selected"]["answers"][0]["miss"] is None
    assert "ValueError" in caplog.text and SECRET not in caplog.text


def test_an_answer_that_was_broken_off(served):
    thread = served.engine.thread("trip", namespace="a")
    stream = thread.stream(conversation(), policy=RecoveryPolicy.default(), max_new_tokens=5)
    next(stream)
    stream.close()
    (answer,) = served.state(selected=1)["selected"]["answers"]
    assert not answer["complete"] and answer["output_tokens"] == 0
    assert sum(answer["tokens"].values()) == sum(tokens for _, tokens in answer["strip"]) > 0
