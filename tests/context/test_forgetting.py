from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkv_agents.context import (
    ContextHistory,
    Edit,
    EditKind,
    HistoryStore,
    MemoryHistoryStore,
    SQLiteHistoryStore,
    ThreadKey,
    parse_messages,
)
from patchkv_agents.context.stores.codec import encode_edit, encode_message
from patchkv_agents.context.versioning.scrubbing import Scrubber
from patchkv_agents.errors import ContextError

from .samples import agent_messages

SECRET = 'ada@example.org "quoted" é'


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> HistoryStore:
    if request.param == "memory":
        return MemoryHistoryStore()
    return SQLiteHistoryStore(tmp_path / "h.db")


def everything(store: HistoryStore) -> str:
    """All that a store gives out, as text."""
    parts = []
    for key in store.threads():
        for version_id in store.version_ids(key):
            version = store.load(key, version_id)
            assert version is not None
            parts += map(encode_message, version.messages)
            parts += [repr(encode_edit(edit)) for edit in version.edits]
            parts += [tool.text for tool in version.tools]
            parts += [version.template_args.text, version.author or ""]
    return "\n".join(parts)


def with_text(index: int, text: str) -> list[dict[str, Any]]:
    messages = agent_messages()
    messages[index]["content"] = text
    return messages


def test_redacting_removes_every_earlier_form(store: HistoryStore) -> None:
    history = ContextHistory(store, thread="t")
    first = history.commit(with_text(3, "FORM-1"))
    second = history.replace(3, "FORM-2 of it")
    third = history.insert(0, {"role": "system", "content": "kept"})
    fourth = history.replace("c1", "FORM-3 of it", author="board")
    hashes = [v.messages[i].content_hash for v, i in ((first, 3), (second, 3), (fourth, 4))]
    assert all(h in everything(store) for h in hashes)
    version = history.redact("c1", "gone", author="policy")
    forgotten = version.forgotten
    assert forgotten is not None and forgotten.status == "erased"
    assert forgotten.messages == 3 and forgotten.still_shown == ()
    assert forgotten.versions == (first.id, second.id, third.id, fourth.id)
    assert forgotten.threads == (ThreadKey("t"),)
    assert forgotten.hashes == 5  # two edits' hashes before and after, and the redaction's before
    text = everything(store)
    assert "FORM" not in text and not any(h in text for h in hashes)
    for old, index in ((first, 3), (second, 3), (third, 4), (fourth, 4)):
        message = history.get(old.id).messages[index]
        assert (message.content, message.tool_call_id, message.id) == ("[removed]", "c1", "m3")
    assert version.messages[4].content == "gone"
    assert [e.kind for e in version.edits] == [EditKind.REDACT] and version.edits[0].forget
    # All else is as it was, edits included.
    assert history.get(first.id).messages[:3] == first.messages[:3]
    (edit,) = history.get(fourth.id).edits
    assert (edit.author, edit.tool_call_ids, edit.old_indices) == ("board", ("c1",), (4,))
    assert history.log() == (version, *map(history.get, (fourth.id, third.id, second.id, first.id)))


def test_other_branches_and_forks_are_reached(store: HistoryStore) -> None:
    history = ContextHistory(store, thread="t")
    first = history.commit(with_text(5, "Mail ada about track 4, please, FORM-1."))
    history.branch("side")
    fork = history.fork("fork")
    history.checkout("side")
    # A later form that kept a part of the text goes; one that kept nothing stays.
    partial = history.replace(5, "Mail ada about track 4, please.")
    replaced = history.replace(5, "Entirely different words here")
    fork_version = fork.replace(0, "Be brief.", kind=EditKind.REWRITE_SYSTEM)
    stranger = ContextHistory(store, thread="stranger")
    stranger.commit(with_text(5, "Mail ada about track 4, please, FORM-1."))
    history.checkout("main")
    version = history.delete(5, forget=True)
    assert version.forgotten is not None
    assert set(version.forgotten.versions) == {first.id, partial.id, fork_version.id}
    assert version.forgotten.threads == (ThreadKey("fork"), ThreadKey("t"))
    assert history.get(partial.id).messages[5].content == "[removed]"
    assert history.get(replaced.id).messages[5].content == "Entirely different words here"
    assert fork.get(fork_version.id).messages[5].content == "[removed]"
    assert stranger.refresh() is not None and "ada" in stranger.head.messages[5].text


def test_secrets_are_removed_wherever_they_stand(store: HistoryStore) -> None:
    history = ContextHistory(store, thread="t")
    messages = agent_messages()
    messages[0]["content"] = f"The user is {SECRET}."
    messages[2]["reasoning"] = f"I know {SECRET}."
    messages[2]["tool_calls"][0]["args"] = {"to": SECRET, SECRET: [1, {"x": SECRET}]}
    messages[4]["tool_calls"][0]["function"]["arguments"] = (
        '{"to": "ada@example.org \\"quoted\\" \\u00E9", "n":  1}'
    )
    messages[5]["content"] = [{"type": "text", "text": f"a {SECRET} b"}]
    messages[6]["x-note"] = {"who": SECRET}
    old = history.commit(
        messages,
        tools=[{"name": "f", "description": f"for {SECRET}"}],
        template_args={"user": SECRET},
        author=SECRET,
    )
    middle = history.commit(agent_messages(), author="me")
    version = history.redact(secrets=[SECRET])
    assert version.forgotten is not None and version.messages == middle.messages
    assert version.forgotten.versions == (old.id,) and version.forgotten.messages == 5
    text = everything(store)
    assert "example.org" not in text and "quoted" not in text
    found = history.get(old.id)
    assert found.messages[0].content == "The user is [removed]."
    assert found.messages[2].tool_calls[0].arguments == {
        "to": "[removed]",
        "[removed]": [1, {"x": "[removed]"}],
    }
    assert found.messages[4].tool_calls[0].parsed_arguments() == {"to": "[removed]", "n": 1}
    assert found.tools[0].load() == {"name": "f", "description": "for [removed]"}
    assert found.template_args.load() == {"user": "[removed]"}
    assert found.author == "[removed]"
    assert found.messages[1] == old.messages[1]


def test_secrets_of_the_present_version(store: HistoryStore) -> None:
    history = ContextHistory(store, thread="t")
    history.commit(with_text(5, "code 4711-42, and more"), tools=[{"name": "4711-42"}])
    version = history.redact("c1", "nothing", secrets=["4711-42"])
    assert [m.text for m in version.messages][3:6:2] == ["nothing", "code [removed], and more"]
    assert version.tools[0].load() == {"name": "[removed]"}
    messages = [edit for edit in version.edits if edit.scope == "messages"]
    assert [(e.kind, e.old_indices, e.forget) for e in messages] == [
        (EditKind.REDACT, (3,), True),
        (EditKind.REDACT, (5,), True),
    ]
    assert "4711-42" not in everything(store)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"secrets": ["abc"]}, "4 characters or more"),
        ({"secrets": ["   a   "]}, "4 characters or more"),
        ({"secrets": "a word"}, "Pass secrets as a list"),
        ({"secrets": ["\ud800abcdef"]}, "lone surrogate"),
        ({"targets": 3, "replacement": "my word", "secrets": ["word"]}, "replacement holds one"),
        ({"secrets": ["part-of-name"]}, "name of a thread or branch holds one of the secrets"),
    ],
)
def test_what_cannot_be_redacted(arguments: dict[str, Any], problem: str) -> None:
    history = ContextHistory(thread="a part-of-name")
    head = history.commit(agent_messages())
    with pytest.raises(ContextError, match=problem):
        history.redact(**arguments)
    assert history.head is head and history.branches() == {"main": head.id}


def test_a_forget_declared_with_a_commit(store: HistoryStore) -> None:
    history = ContextHistory(store, thread="t")
    first = history.commit(with_text(3, "FORM-1"))
    said = Edit.declare(EditKind.REDACT, tool_call_ids=["c1"], forget=True)
    version = history.commit(with_text(3, "gone"), edits=[said], author="policy")
    assert version.forgotten is not None and version.forgotten.versions == (first.id,)
    assert "FORM" not in everything(store)


def test_a_forget_declared_for_an_unchanged_context(store: HistoryStore) -> None:
    """The text was replaced first, and that it must be forgotten is said afterwards."""
    history = ContextHistory(store, thread="t")
    first = history.commit(with_text(3, "FORM-1"))
    second = history.commit(with_text(3, "gone"))
    said = Edit.declare(EditKind.REDACT, new=[3], forget=True)
    version = history.commit(with_text(3, "gone"), edits=[said])
    assert version.messages == second.messages and version.parents == (second.id,)
    assert [(e.forget, e.corrected, e.tool_call_ids) for e in version.edits] == [
        (True, True, ("c1",))
    ]
    assert version.forgotten is not None
    assert version.forgotten.versions == (first.id,)
    assert version.forgotten.still_shown == (3,)  # the caller goes on showing "gone"
    assert "FORM" not in everything(store)
    # Said again, as by a middleware at each call, it is known.
    again = Edit.declare(EditKind.REDACT, new=[3], forget=True)
    assert history.commit(with_text(3, "gone"), edits=[again]) == version


def test_what_the_caller_goes_on_showing_is_left_and_named(store: HistoryStore) -> None:
    history = ContextHistory(store, thread="t")
    history.commit([{"role": "user", "content": text} for text in ("same", "x", "same")])
    version = history.redact(0)
    assert version.forgotten is not None and version.forgotten.still_shown == (2,)
    assert version.messages[2].content == "same"
    assert version.forgotten.messages == 0
    history.redact(2)
    assert "same" not in everything(store)


def test_a_summary_takes_its_sources_with_it(store: HistoryStore) -> None:
    history = ContextHistory(store, thread="t")
    history.commit(agent_messages())
    history.summarize(range(1, 7), "The user asked for the 9:40; track 4.")
    history.redact(1)
    text = everything(store)
    assert "9:40" not in text and "kiosk" not in text and "rack 4" not in text
    assert "Thanks! And the 10:10?" in text


def test_a_failed_forget_changes_nothing(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = ContextHistory(store, thread="t")
    head = history.commit(agent_messages())

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("patchkv_agents.context.versioning.history.forget", fail)
    with pytest.raises(MemoryError):
        history.redact(3)
    assert history.branches() == {"main": head.id} and history.get(head.id) == head
    monkeypatch.undo()
    assert history.redact(3).parents == (head.id,)


words = st.sampled_from(["alpha", "beta", "gamma", "delta", "SECRET-WORD"])
texts = st.lists(words, min_size=1, max_size=4).map(" ".join)
steps = st.lists(
    st.tuples(st.sampled_from(["replace", "delete", "insert", "move", "branch", "back"]), texts),
    max_size=12,
)


@settings(max_examples=60)
@given(st.lists(texts, min_size=2, max_size=4), steps, st.data())
def test_no_secret_is_left_after_any_history(
    first: list[str], script: list[tuple[str, str]], data: st.DataObject
) -> None:
    history = ContextHistory()
    history.commit([{"role": "user", "content": text} for text in first])
    for step, text in script:
        count = len(history.show().messages)
        index = data.draw(st.integers(0, count - 1))
        operations: dict[str, Callable[[], Any]] = {
            "replace": lambda i=index, t=text: history.replace(i, t, kind=EditKind.OTHER),
            "delete": lambda i=index, n=count: history.delete(i) if n > 1 else None,
            "insert": lambda i=index, t=text: history.insert(i, {"role": "user", "content": t}),
            "move": lambda i=index: history.move(i, 0),
            "branch": lambda: history.checkout(history.version_ids()[0]),
            "back": lambda: history.checkout("main"),
        }
        operations[step]()
    before = {name: history.get(name) for name in history.version_ids()}
    version = history.redact(0, secrets=["SECRET-WORD"])
    text = everything(history.store)
    assert "SECRET-WORD" not in text
    assert version.forgotten is not None
    touched = set(version.forgotten.versions)
    for name, old in before.items():
        now = history.get(name)
        assert len(now.messages) == len(old.messages)
        assert (now.messages != old.messages) == (name in touched)
        assert (now.parents, now.time_s) == (old.parents, old.time_s)
    removed = before[version.parents[0]].messages[0]
    shown = {m.content_hash for m in version.messages}
    for name in history.version_ids():
        for edit in history.get(name).edits:
            if removed.content_hash not in shown:
                assert removed.content_hash not in (edit.before_hash, edit.after_hash)


def test_equal_text_is_removed_whatever_the_ids() -> None:
    history = ContextHistory()
    history.commit(parse_messages([{"role": "user", "content": "FORM", "id": "a"}]))
    history.checkout(history.commit([{"role": "user", "content": "FORM", "id": "b"}]))
    history.redact("b")
    assert "FORM" not in everything(history.store)


def test_earlier_forms_without_the_secret_are_kept(store: HistoryStore) -> None:
    """What is to be forgotten are these texts, not the messages that held them."""
    history = ContextHistory(store, thread="t")
    history.commit([{"role": "user", "content": "harmless words about something else"}])
    history.commit([{"role": "user", "content": "code 4711-42"}])
    version = history.redact(secrets=["4711-42"])
    texts = [v.messages[0].content for v in history.log()]
    assert texts == ["code [removed]", "code [removed]", "harmless words about something else"]
    assert version.edits[0].forget


def test_tools_and_template_args_that_are_forgotten(store: HistoryStore) -> None:
    history = ContextHistory(store, thread="t")
    tools = [[{"name": "f", "description": text}] for text in ("TOOL-1", "TOOL-2", "fine")]
    history.commit(agent_messages(), tools=tools[0], template_args={"user": "USER-1"})
    history.commit(agent_messages(), tools=tools[1], template_args={"user": "USER-1"})
    said = [
        Edit.declare(EditKind.REDACT, scope="tools", forget=True),
        Edit.declare(EditKind.REDACT, scope="template_args", forget=True),
    ]
    version = history.commit(agent_messages(), tools=tools[2], edits=said)
    assert version.forgotten is not None and len(version.forgotten.versions) == 2
    text = everything(store)
    assert "TOOL" not in text and "USER" not in text
    assert all(each.tools == version.tools for each in history.log())
    hashes = [h for v in history.log() for e in v.edits for h in (e.before_hash, e.after_hash)]
    assert set(hashes) == {None, *(e.after_hash for e in version.edits)}


def test_an_id_that_is_a_secret(store: HistoryStore) -> None:
    history = ContextHistory(store, thread="t")
    history.commit([{"role": "user", "content": t, "id": f"ada@example.org{t}"} for t in ("", "b")])
    version = history.redact(secrets=["ada@example.org", "ada@example.orgb"])
    assert [message.id for message in version.messages] == [None, None]
    assert "example.org" not in everything(store)


@pytest.mark.parametrize(
    "go_on",
    [
        lambda h, old: h.replace(2, "other", kind=EditKind.OTHER),
        lambda h, old: h.revert(old),
        lambda h, old: h.branch("third", at=old) and h.checkout("third") and h.delete(2),
        lambda h, old: h.checkout(old) and h.insert(0, {"role": "user", "content": "new"}),
        lambda h, old: h.commit([{"role": "user", "content": "new"}], parent=old),
    ],
    ids=["operation", "revert", "branch", "checkout", "commit"],
)
def test_what_was_read_before_does_not_bring_forgotten_text_back(
    store: HistoryStore, go_on: Callable[[ContextHistory, Any], Any]
) -> None:
    """Operations worked on the version as it was read, and stored its text and hashes again."""
    history = ContextHistory(store, thread="t")
    texts = ["the SECRET-WORD", "something else entirely", "and more"]
    old = history.commit([{"role": "user", "content": text} for text in texts])
    history.branch("side")
    other = ContextHistory(store, thread="t", branch="side")
    history.redact(secrets=["SECRET-WORD"])
    go_on(other, old)
    text = everything(store)
    assert "SECRET-WORD" not in text and old.messages[0].content_hash not in text
    assert "SECRET-WORD" not in repr(other.log()) and "SECRET-WORD" not in repr(other.show())


@pytest.mark.parametrize("secret", ["a/b<c>&d", 'say "x"\n\\y', "Ключ-🔑é", "p\\\\q.*"])
def test_secrets_in_every_spelling_of_json(secret: str) -> None:
    """Other writers escape `/` (PHP), `<`, `>` and `&` (Go), or nest JSON deeper than we looked."""
    scrubber = Scrubber.of([secret])
    plain = json.dumps(secret)[1:-1]
    units = secret.encode("utf-16-be").hex().upper()
    spellings = [
        secret,
        plain,
        json.dumps(secret, ensure_ascii=False)[1:-1],
        json.dumps(json.dumps(plain)[1:-1])[1:-1],  # JSON in JSON in JSON
        plain.replace("/", "\\/"),
        plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)),
        unicodedata.normalize("NFD", secret),
    ]
    for spelling in spellings:
        found = scrubber.text(f"x {spelling} y")
        assert found == "x [removed] y", spelling
    assert scrubber.text("x p\\qz a-b y") == "x p\\qz a-b y"
