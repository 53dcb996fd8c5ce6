"""Which versions came after an edit that says forget."""

from __future__ import annotations

import pytest

from patchkv_agents.context import ContextHistory
from patchkv_agents.context.lineage.ancestry import ForgettingSearch, came_after


def conversation(*results):
    return [
        {"role": "user", "content": "Which pier?"},
        *({"role": "tool", "content": text, "tool_call_id": text} for text in results),
    ]


@pytest.fixture
def history():
    return ContextHistory()


def test_the_newest_forgetting_version_is_found_and_remembered(history, monkeypatch):
    line = ForgettingSearch()
    first = history.commit(conversation("a secret"))
    assert line.newest(history, first) is None
    forgetting = history.replace(1, "[removed]", forget=True)
    for step in range(5):
        last = history.commit(conversation("[removed]", f"result {step}"))
    assert line.newest(history, last).id == forgetting.id
    asked = []
    real = history.get
    monkeypatch.setattr(history, "get", lambda ref: asked.append(ref) or real(ref))
    after = history.commit(conversation("[removed]", "the end"))
    asked.clear()
    assert line.newest(history, after).id == forgetting.id
    assert asked == [last.id]


def test_only_descendants_came_after(history):
    first = history.commit(conversation("a secret"))
    other = history.commit(conversation("a secret", "more"), branch="other")
    history.checkout(first.id)
    history.commit(conversation("a secret"), branch="main")
    forgetting = history.replace(1, "[removed]", forget=True)
    last = history.commit(conversation("[removed]", "more"))
    after = [
        came_after(history, version, forgetting.id)
        for version in (last.id, forgetting.id, first.id, other.id, "unknown")
    ]
    assert after == [True, True, False, False, False]
