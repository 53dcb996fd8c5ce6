"""Pairs: their files, what is no pair, and the split by task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from patchkv_agents.context import ContextHistory, Conversation, parse_messages
from patchkv_agents.context.stores import SQLiteHistoryStore
from patchkv_agents.errors import InputError
from patchkv_agents.profiling.pair_readers import history_pairs, read_pairs
from patchkv_agents.profiling.pairs import (
    ContextPair,
    context_digest,
    joined,
    pair_set,
    split,
)


def messages(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text} for text in texts]


def pair(id: str, task: str, *, dataset: str = "d", text: str | None = None) -> ContextPair:
    old, new = (
        Conversation(parse_messages(messages(f"{text or id} {which}", "same")))
        for which in ("old", "new")
    )
    return ContextPair(id, task, "refresh", dataset, old, new)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_lines_become_pairs_with_the_kind_found_by_comparing(tmp_path: Path) -> None:
    tool = {"role": "tool", "tool_call_id": "c", "content": "rain"}
    file = write(
        tmp_path / "mine.jsonl",
        {"old": [*messages("q"), tool], "new": [*messages("q"), {**tool, "content": "sun"}]},
        {"old": messages("a"), "new": messages("b"), "task": "t", "kind": "flip", "id": "x",
         "answers": ["b"], "stale_answers": ["a"]},
    )  # fmt: skip
    first, second = read_pairs(file).pairs
    assert (first.id, first.task, first.kind) == (
        "line 1",
        context_digest(first.old),
        "replace_tool_result",
    )
    assert first.dataset == "mine" and [str(e.kind) for e in first.edits] == [first.kind]
    assert (second.id, second.task, second.kind) == ("x", "t", "flip")
    assert (second.answers, second.stale_answers) == (("b",), ("a",))


def test_versions_are_consecutive_pairs_of_one_task_without_appends(tmp_path: Path) -> None:
    chain = [messages("a", "z"), messages("a", "z", "more"), messages("b", "z", "more")]
    found = read_pairs(write(tmp_path / "v.jsonl", {"versions": chain, "id": "v"}))
    assert [(each.id, each.task) for each in found.pairs] == [
        ("v/2", context_digest(Conversation(parse_messages(chain[0]))))
    ]
    assert [skip.id for skip in found.skipped] == ["v/1"]
    assert "only appends" in found.skipped[0].reason


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ("[[1]]", "write an object"),
        ('{"old": []}', "'new' is missing"),
        ('{"old": [], "new": []}', "'old' is not a list of messages with at least one"),
        ('{"old": [{"role": "x"}], "new": []}', "field 'role'"),
        ('{"versions": [[]]}', "at least two"),
        ('{"old": 1, "new": 2, "tasks": "a"}', "'tasks' is not a field"),
        ('{"old": [], "new": [], "task": 3}', "'task' is 3"),
        ('{"old": [], "new": [], "task": "\\ud800"}', "'task': lone surrogate"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(tmp_path: Path, line: str, told: str) -> None:
    file = tmp_path / "bad.jsonl"
    good = json.dumps({"old": messages("a"), "new": messages("b")})
    file.write_text(f"{good}\n\n{line}\n")
    with pytest.raises(InputError, match="line 3") as caught:
        read_pairs(file)
    assert told in str(caught.value)


def test_repeated_ids_are_an_error_and_repeated_or_unchanged_contexts_are_left_out() -> None:
    with pytest.raises(InputError, match="two pairs of id 'a'"):
        pair_set("s", [pair("a", "1"), pair("a", "2")])
    old = pair("c", "3").old
    unchanged = ContextPair("c", "3", "refresh", "d", old, old)
    found = pair_set("s", [pair("a", "1"), pair("b", "2", text="a"), unchanged])
    assert [each.id for each in found.pairs] == ["a"]
    assert [(skip.id, skip.reason) for skip in found.skipped] == [
        ("b", "the same contexts as a"),
        ("c", "old and new are the same"),
    ]


def test_a_set_is_named_by_its_content_whatever_the_order() -> None:
    pairs = [pair("a", "1"), pair("b", "2")]
    one, other = pair_set("s", pairs), pair_set("s", pairs[::-1])
    assert one.sha256 == other.sha256
    assert pair_set("s", [pair("a", "1"), pair("b", "3")]).sha256 != one.sha256


def test_tasks_are_split_half_and_half_in_each_data_set_in_any_order() -> None:
    pairs = [
        pair(f"{dataset}{task}/{number}", f"{dataset}{task}", dataset=dataset)
        for dataset in "abc"
        for task in range(6)
        for number in range(3)
    ]
    calibration, validation = split(pairs)
    assert not {each.task for each in calibration} & {each.task for each in validation}
    assert len(calibration) + len(validation) == len(pairs)
    for dataset in "abc":
        tasks = {each.task for each in calibration if each.dataset == dataset}
        assert len(tasks) == 3
    assert {each.id for each in split(pairs[::-1])[0]} == {each.id for each in calibration}


def test_tasks_that_share_a_context_stay_together() -> None:
    """The same conversation given under two names would be in both splits."""
    same = pair("x", "x").old
    for number in range(8):
        new = pair(f"new {number}", "").new
        pairs = [
            ContextPair("one", f"first {number}", "refresh", "d", same, pair("y", "").new),
            ContextPair("two", f"second {number}", "refresh", "d", same, new),
            pair("three", f"third {number}"),
        ]
        sides = [{each.id for each in side} for side in split(pairs)]
        assert {"one", "two"} in sides


def test_a_history_gives_its_edits_and_forks_belong_to_their_thread(tmp_path: Path) -> None:
    store = SQLiteHistoryStore(tmp_path / "agent.db")
    history = ContextHistory(store, thread="one")
    history.commit(messages("a", "z"))
    history.commit(messages("a", "z", "more"))
    history.commit(messages("b", "z", "more"))
    fork = history.fork("two")
    fork.commit(messages("c", "z", "more"))
    ContextHistory(store, thread="other").commit(messages("x"))
    store.close()
    found = history_pairs(tmp_path / "agent.db")
    assert [each.new.messages[0].text for each in found.pairs] == ["b", "c"]
    assert {each.task for each in found.pairs} == {"one"}
    with pytest.raises(InputError, match="no file"):
        history_pairs(tmp_path / "none.db")


def test_versions_whose_template_is_given_arguments_are_left_out_with_the_reason(
    tmp_path: Path,
) -> None:
    """They were rendered without them: other tokens than the user's own."""
    store = SQLiteHistoryStore(tmp_path / "agent.db")
    history = ContextHistory(store, thread="one")
    thinking = {"enable_thinking": False}
    history.commit(messages("a", "z"), template_args=thinking)
    history.commit(messages("b", "z"), template_args=thinking)
    history.commit(messages("c", "z"))
    history.commit(messages("d", "z"))
    history.fork("two")
    store.close()
    found = history_pairs(tmp_path / "agent.db")
    assert [each.new.messages[0].text for each in found.pairs] == ["d"]
    assert len(found.skipped) == 2
    assert all("enable_thinking" in each.reason for each in found.skipped)


def test_sources_are_joined_and_limited_by_kind_and_data_set() -> None:
    one = pair_set("one", [pair("a", "1"), pair("b", "2"), pair("c", "3", dataset="e")])
    assert [each.id for each in one.first(1).pairs] == ["a", "c"]
    both = joined([one, pair_set("two", [pair("d", "4"), pair("e", "5", text="a")])])
    assert (both.name, both.tasks) == ("one, two", 4)
    assert both.skipped[0].id == "e"
    again = joined([one, pair_set("two", [pair("a", "5", text="f")])])
    assert [each.id for each in again.pairs] == ["a", "b", "c", "a (2)"]
