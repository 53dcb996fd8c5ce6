"""Which conversation a request belongs to, and what is kept of each."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from patchkv_agents.checkpoint.stores import open_store
from patchkv_agents.context import ContextHistory, SQLiteHistoryStore, ThreadKey, render
from patchkv_agents.context.explaining.causes import Cause
from patchkv_agents.context.explaining.explain import explain
from patchkv_agents.engine import Engine, Thread
from patchkv_agents.recovery import RecoveryPolicy
from patchkv_server import ServerSettings, threads
from patchkv_server.chat_requests import read_chat
from patchkv_server.requests import ChatRequest, Sender

from .conftest import NewEngine
from .serving import MODEL, Served, serving, talk, until

HINT = "Answer briefly, and only of what is in the shop. " * 12


@pytest.fixture(scope="module")
def served(new_engine: NewEngine) -> Iterator[Served]:
    with serving(new_engine()) as served:
        yield served


def ask(served: Served, messages: Any, key: str = "none", **body: Any) -> dict[str, Any]:
    """The recovery object of an answer."""
    reply = served.client(key).chat.completions.create(
        model=MODEL, messages=messages, max_tokens=4, temperature=0, extra_body=body
    )
    recovery: dict[str, Any] = reply.recovery  # type: ignore[attr-defined]
    return recovery


def edited(messages: list[dict[str, Any]], index: int = 2) -> list[dict[str, Any]]:
    changed = [dict(message) for message in messages]
    changed[index]["content"] = "It has been sold."
    return changed


def test_an_edited_conversation_is_found_and_recovered(new_engine: NewEngine) -> None:
    with serving(new_engine(RecoveryPolicy.default())) as served:
        messages = talk("Ann", turns=24)
        first = ask(served, messages)
        assert (first["tokens"], first["restored"], first["edits"]) == (first["new"], 0, [])
        second = ask(served, edited(messages))
        assert second["thread"] == first["thread"]
        assert second["restored"] > second["tokens"] / 2
        assert [edit["new_indices"] for edit in second["edits"]] == [[2]]
        third = ask(served, [*edited(messages), {"role": "assistant", "content": "On shelf 3."}])
        assert third["thread"] == first["thread"]


def test_a_conversation_is_continued_where_least_is_left(new_engine: NewEngine) -> None:
    with serving(new_engine()) as served:
        long = talk("Ann", turns=8)
        short = long[:5]
        other = [*short, *talk("Bob", turns=8)[1:]]
        names = [
            ask(served, messages, thread=name)["thread"]
            for name, messages in (("long", long), ("other", other))
        ]
        assert names == ["long", "other"]
        assert ask(served, [*long, *talk("Ann", 1)[-1:]])["thread"] == "long"
        assert ask(served, [*other, *talk("Ann", 1)[-1:]])["thread"] == "other"


def test_the_same_system_prompt_alone_begins_a_thread_with_its_rows(new_engine: NewEngine) -> None:
    with serving(new_engine()) as served:
        first = ask(served, talk("Ann", 3, system=HINT))
        second = ask(served, talk("Bob", 3, system=HINT))
        assert second["thread"] != first["thread"]
        assert second["is_exact"]
        assert second["cache_read"] > 100
        assert second["edits"] == []  # it has a history of its own
        again = ask(served, [*talk("Ann", 3, system=HINT), {"role": "user", "content": "Well?"}])
        assert again["thread"] == first["thread"]
        assert again["cache_read"] >= first["tokens"] - 8  # it lost nothing


def test_programs_that_are_asked_the_same_are_not_merged(new_engine: NewEngine) -> None:
    """A "say hi" restored 242 rows of another program's 5,677, and stayed approximate for good."""
    hi, rules = {"role": "user", "content": "say hi"}, "Be brief, and never mention this. " * 40
    persona = [
        [{"role": "system", "content": f"{rules} You are {name}."}, hi] for name in ("Ann", "Bob")
    ]
    with serving(new_engine(RecoveryPolicy.default())) as served:
        first = ask(served, [{"role": "system", "content": "You travel. " * 150}, hi])
        answers = [first, *(ask(served, messages) for messages in persona)]
        gone_on = ask(served, [*persona[1], {"role": "assistant", "content": "Hi."}, hi])
        assert len({answer["thread"] for answer in answers}) == 3
        assert gone_on["thread"] == answers[2]["thread"]
        assert all(answer["is_exact"] and not answer["restored"] for answer in [*answers, gone_on])
        assert answers[2]["cache_read"] > answers[2]["tokens"] / 2  # up to the name
        assert gone_on["cache_read"] >= answers[2]["tokens"] - 8


def test_agents_that_read_the_same_file_stay_exact(new_engine: NewEngine) -> None:
    """Two tasks of one program read the same file: both went on approximately, in one thread.

    A next turn went to the thread that left least to compute, not to its own, which is exact.
    """
    read = {"name": "read", "arguments": '{"path": "a"}'}
    told = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Go on."}]
    turns: dict[str, list[dict[str, Any]]] = {}
    answers: dict[str, list[dict[str, Any]]] = {}
    with serving(new_engine(RecoveryPolicy.default())) as served:
        for name in ("alpha", "beta", "gamma"):
            begin = [{"role": "system", "content": HINT}, {"role": "user", "content": name}]
            call = {"id": f"call-{name}", "type": "function", "function": read}
            called = {"role": "assistant", "content": None, "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "A shelf. " * 300}
            turns[name] = [*begin, called, result, *told]
        for end in (2, 4, 6):
            for name, messages in turns.items():
                answers.setdefault(name, []).append(ask(served, messages[:end]))
    assert len({answer["thread"] for all_of_one in answers.values() for answer in all_of_one}) == 3
    for one, two, three in answers.values():
        assert one["thread"] == two["thread"] == three["thread"]
        assert two["is_exact"] and two["cache_read"] >= one["tokens"] - 8
        assert three["is_exact"] and three["cache_read"] >= two["tokens"] - 8


def test_users_with_the_same_opening_part(new_engine: NewEngine) -> None:
    """One user's question was recorded as an edit of the other's."""
    opening = [*talk("Ann", 1, system=HINT), {"role": "assistant", "content": "Hello!"}]
    with serving(new_engine(RecoveryPolicy.default())) as served:
        ask(served, opening[:2])
        one = ask(served, [*opening, {"role": "user", "content": "Where is my parcel of tea?"}])
        two = ask(served, [*opening, {"role": "user", "content": "Cancel all that I ordered."}])
        assert two["thread"] != one["thread"]
        assert two["edits"] == []
        assert two["is_exact"] and two["cache_read"] > two["tokens"] / 2


def test_utility_calls_do_not_evict(new_engine: NewEngine) -> None:
    with serving(new_engine()) as served:
        messages = talk("Ann", turns=20)
        first = ask(served, messages)
        title = {"role": "system", "content": "Give the conversation a title of three words."}
        for utility in (
            [title, messages[1]],  # repeats what the user said first
            [title, *messages[1:3]],
            [{"role": "user", "content": f"Give a title to: {messages}"[:900]}],
        ):
            assert ask(served, utility)["thread"] != first["thread"]
        again = ask(served, [*messages, {"role": "user", "content": "Well?"}])
        assert again["thread"] == first["thread"]
        assert again["cache_read"] >= first["tokens"] - 8


def test_tenants_never_share(new_engine: NewEngine) -> None:
    with serving(new_engine(), keys=["ann:secret-key-1", "bob:secret-key-2"]) as served:
        for thread in (None, "mine"):
            body = {} if thread is None else {"thread": thread}
            messages = talk("Ann" if thread is None else "Eve", system=HINT)
            first = ask(served, messages, "secret-key-1", **body)
            second = ask(served, messages, "secret-key-2", **body)
            again = ask(served, messages, "secret-key-1", user="bob", **body)
            assert first["cache_read"] == 0 or thread  # the second one shares Ann's own prompt
            assert second["cache_read"] == first["cache_read"]
            assert again["cache_read"] == first["tokens"] - 1
        tenants = {served.service.threads.owner_of(key) for key in served.service.places()}
        assert {("ann", "mine"), ("bob", "mine")} <= tenants


def test_a_key_sees_no_other_tenants_figures(new_engine: NewEngine) -> None:
    keys = ["ann:secret-key-1", "bob:secret-key-2", "operator:secret-key-3"]
    with serving(new_engine(), keys=keys) as served:
        ask(served, talk("Ann"), "secret-key-1")

        def seen(key: str, path: str) -> httpx.Response:
            return httpx.get(served.url + path, headers={"Authorization": f"Bearer {key}"})

        for key, answers in (("secret-key-1", 1), ("secret-key-2", 0), ("secret-key-3", 1)):
            metrics, state = seen(key, "/metrics").text, seen(key, "/patchkv/state").json()
            assert f"patchkv_output_tokens_total {4.0 * answers}" in metrics
            assert ('patchkv_requests_total{status="200"} 1.0' in metrics) == bool(answers)
            assert f'patchkv_threads{{place="live"}} {float(answers)}' in metrics
            assert (state["memory"]["live_bytes"] > 0) == bool(answers)
            assert (state["totals"]["answers"], len(state["threads"])) == (answers, answers)


def test_users_are_tenants_without_keys(new_engine: NewEngine) -> None:
    with serving(new_engine()) as served:
        ask(served, talk("Ann"), user="a/b")
        assert ask(served, talk("Ann"), user="a%2Fb")["cache_read"] == 0
        assert ask(served, talk("Ann"))["cache_read"] == 0
        assert ask(served, talk("Ann"), user="a/b")["cache_read"] > 0


@pytest.mark.parametrize("name", ["x\"'<script>", " spaces around ", "a/../b", "Zoë 漢", " "])
def test_names_of_threads(served: Served, name: str) -> None:
    """A name of spaces made a header that could not be sent: no answer in that thread any more."""
    messages = talk(f"Somebody {name}", 1)
    for _ in range(2):
        given = ask(served, messages, thread=name)["thread"]
        assert given == name.strip() or not name.strip()


def test_idle_threads_are_suspended(new_engine: NewEngine) -> None:
    with serving(new_engine(), ServerSettings(idle_suspend_s=0.1)) as served:
        first = ask(served, talk("Ann"))
        until(lambda: set(served.service.places().values()) == {"suspended"})
        memory = served.service.memory()
        assert (memory.live_bytes, memory.suspended_bytes > 0) == (0, True)
        again = ask(served, talk("Ann"))
        assert again["cache_read"] == first["tokens"] - 1
        assert again["restored_formats"]


def test_idle_threads_stay_as_they_are_while_there_is_room(new_engine: NewEngine) -> None:
    """After a minute without a request, a plain append was approximate, and stayed so for good."""
    with serving(new_engine(RecoveryPolicy.default())) as served:
        first = ask(served, talk("Ann", 8))
        served.service.threads.fit(served.service.settings.memory_budget_bytes)
        until(lambda: not served.service.queue().running)
        time.sleep(1.5)  # housekeeping ran meanwhile
        assert set(served.service.places().values()) == {"live"}
        again = ask(served, [*talk("Ann", 8), {"role": "user", "content": "Well?"}])
        assert again["is_exact"] and again["restored"] == 0
        assert again["cache_read"] >= first["tokens"] - 8


def test_suspending_costs_a_conversation_nothing_while_there_is_room(new_engine: NewEngine) -> None:
    """Threads were suspended after a minute, with loss: a plain append restored rows and was an
    approximation from then on, while memory was free."""
    engine = new_engine(RecoveryPolicy.default())
    with serving(engine) as served:
        first = ask(served, talk("Ann"))
        assert set(served.service.places().values()) == {"live"}
        served.service.threads.suspend_all()
        assert set(served.service.places().values()) == {"suspended"}
        again = ask(served, [*talk("Ann"), {"role": "user", "content": "Well?"}])
        assert again["cache_read"] >= first["tokens"] - 8
        assert again["is_exact"] and again["restored"] == 0


def test_memory_stays_within_the_budget(new_engine: NewEngine) -> None:
    with serving(new_engine()) as served:
        ask(served, talk("Ann", 8))
        one = sum(served.service.threads.memory())
    with serving(new_engine(), ServerSettings(memory_budget_bytes=3 * one)) as served:
        kept = ask(served, talk("Ann", 8))
        ask(served, [*talk("Ann", 8), {"role": "user", "content": "Well?"}])
        for name in "BCDEFGH":
            ask(served, talk(name, 8))
        until(lambda: sum(served.service.threads.memory()) <= 3 * one)
        again = ask(served, [*talk("Ann", 8), {"role": "user", "content": "And?"}])
        assert again["thread"] == kept["thread"]  # gone on with, so it stays before others
        assert again["cache_read"] >= kept["tokens"] - 8
        assert b"patchkv_evictions_total 0.0" not in _metrics(served)


def _metrics(served: Served) -> bytes:
    return httpx.get(f"{served.url}/metrics").content


def test_goes_on_after_a_restart(new_engine: NewEngine, tmp_path: Path) -> None:
    messages, store = talk("Ann", 12), open_store(tmp_path / "kv")

    def engine() -> Engine:
        history = SQLiteHistoryStore(tmp_path / "history.db")
        return new_engine(RecoveryPolicy.default(), store=store, history=history)

    with serving(engine(), store=store) as served:
        first = ask(served, messages, user="u")
    with serving(engine(), store=store) as served:
        assert set(served.service.places().values()) == {"stored"}
        assert ask(served, messages)["thread"] != first["thread"]  # another tenant's
        second = ask(served, edited(messages), user="u")
        assert second["thread"] == first["thread"]
        assert second["restored"] > 0
        assert [edit["new_indices"] for edit in second["edits"]] == [[2]]


@pytest.mark.parametrize("name", ["01-stale-departure-board", "08-plan-revised"])
def test_shared_edits(shared_dir: Path, new_engine: NewEngine, name: str) -> None:
    replay(shared_dir / "edits" / f"{name}.json", new_engine)


@pytest.mark.slow
def test_all_shared_edits(shared_dir: Path, new_engine: NewEngine) -> None:
    for path in sorted((shared_dir / "edits").glob("*.json")):
        replay(path, new_engine)


def replay(path: Path, new_engine: NewEngine) -> None:
    """Two requests; the second is recovered, and the page can say why it missed."""
    case = json.loads(path.read_text())
    with serving(new_engine(RecoveryPolicy.default())) as served:

        def tools(of: Any) -> Any:
            return [{"type": "function", "function": tool.get("function", tool)} for tool in of]

        def messages(version: str) -> list[Any]:
            return [
                {key: value for key, value in message.items() if key != "id"}
                for message in case[version]
            ]

        first = ask(served, messages("old"), tools=tools(case["tools"]))
        new_tools = case.get("tools_new") or case["tools"]
        second = ask(served, messages("new"), tools=tools(new_tools))
        assert second["thread"] == first["thread"], path
        assert second["restored"] > 0, path
        key = next(iter(served.service.places()))
        versions = served.engine.thread(key.thread).history.log()
        assert len(versions) == 2
        explain_names_a_cause(served, versions)


def explain_names_a_cause(served: Served, versions: Any) -> None:
    new, old = sorted(versions, key=lambda version: version.id, reverse=True)
    told = explain(old, new, lambda version: render(version, served.engine.tokenizer))
    assert told.finding.cause is not Cause.NOTHING_LOST
    assert told.lost > 0


def test_owner_of_a_thread(new_engine: NewEngine) -> None:
    with serving(new_engine()) as served:
        owner = served.service.threads.owner_of
        assert owner(ThreadKey("serve/user-a%2Fb/name/with/slash")) == (
            "user-a/b",
            "name/with/slash",
        )


@pytest.mark.parametrize("broken", ["suspend", "sizes"])
def test_one_thread_that_fails_does_not_end_the_housekeeping(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    failures: list[str] = []
    table, names = _table_of(new_engine(), "abc", failures)

    def fail(thread: Thread) -> Any:
        if thread.id == names[0]:
            raise RuntimeError("broken")
        return (suspend if broken == "suspend" else sizes)(thread)

    suspend, sizes = Thread.suspend, threads._sizes
    with monkeypatch.context() as patch:
        if broken == "suspend":
            patch.setattr(Thread, "suspend", fail)
        else:
            patch.setattr(threads, "_sizes", fail)
        assert table.suspend_idle(-1.0) == 2
        assert len(table.fit(0)) == 2
        assert len(failures) == 2  # once a pass
    assert sorted(table.places().values()) == ["live"]  # the one that failed, and is not busy
    assert table.suspend_idle(-1.0) == 1
    assert len(table.fit(0)) == 1


def test_a_thread_that_cannot_be_dropped_is_free(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[str] = []
    engine = new_engine()
    table, _ = _table_of(engine, "ab", failures)

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "drop", fail)
        assert len(table.fit(0)) == 0
        claim = table.claim(_request("c"))
        assert claim is not None
        table.release(claim, None, answered=False)
        assert "answering" not in table.places().values()
    assert failures
    assert len(table.fit(0)) == 2
    assert set(table.places().values()) == {"stored"}  # the new one, of which there is nothing


def _stored_table(path: Path, new_engine: NewEngine, most: int, failures: list[str]) -> Any:
    """A table over a history file and a store, as at a server's start."""
    store, history = open_store(path / "kv"), SQLiteHistoryStore(path / "history.db")
    engine = new_engine(store=store, history=history)
    table, _ = _table_of(engine, "", failures, most=most, has_store=True)
    table.rediscover()
    return engine, table


def test_threads_beyond_the_limit_are_deleted_for_good(
    new_engine: NewEngine, tmp_path: Path
) -> None:
    """What was given up stayed in the file, and the next start took all of it up again."""
    failures: list[str] = []
    engine, table = _stored_table(tmp_path, new_engine, 2, failures)
    own = ContextHistory(SQLiteHistoryStore(tmp_path / "history.db"), thread="local/mine")
    own.commit(talk("Zoe", 1))  # a program's own, in the same file
    _answer(table, engine, "abc")
    table.suspend_all()
    assert len(table.fit(2**40)) == 1
    engine.flush()
    (gone,) = {"serve/local/a", "serve/local/b", "serve/local/c"} - _known(engine)
    assert gone == "serve/local/a"
    assert engine.stores.checkpoints(ThreadKey(gone)).versions() == []
    assert engine.stores.checkpoints(ThreadKey("serve/local/b")).versions() != []
    again, fewer = _stored_table(tmp_path, new_engine, 1, failures)  # and with a smaller limit
    assert {key.thread for key in fewer.places()} == {"serve/local/c"}
    assert _known(again) == {"local/mine", "serve/local/c"}
    assert failures == []


def _known(engine: Engine) -> set[str]:
    return {key.thread for key in engine.stores.threads()}


def test_an_unreadable_history_does_not_keep_others_from_being_found(
    new_engine: NewEngine, tmp_path: Path
) -> None:
    failures: list[str] = []
    engine, table = _stored_table(tmp_path, new_engine, 8, failures)
    _answer(table, engine, "abc")
    with closing(sqlite3.connect(tmp_path / "history.db")) as file, file:
        changed = file.execute(
            "UPDATE versions SET splices = 'x' WHERE key = (SELECT version FROM members JOIN "
            "threads ON members.thread = threads.key WHERE threads.thread = 'serve/local/b')"
        )
        assert changed.rowcount == 1
    engine, table = _stored_table(tmp_path, new_engine, 8, failures)
    assert {key.thread for key in table.places()} == {"serve/local/a", "serve/local/c"}
    assert failures == ["a stored history cannot be read and is left out"]
    assert "serve/local/b" in _known(engine)


def _request(name: str) -> ChatRequest:
    body = {"model": MODEL, "messages": talk(name, 1)}
    return read_chat(body, Sender("local", name), [MODEL], 2)[1]


def _table_of(
    engine: Engine, names: str, failures: list[str], *, most: int = 8, has_store: bool = False
) -> tuple[threads.ThreadTable, list[str]]:
    """A table of threads that answered once, and their ids in the engine."""
    table = threads.ThreadTable(
        engine,
        most=most,
        has_store=has_store,
        on_failure=lambda what, error: failures.append(what),
    )
    return table, _answer(table, engine, names)


def _answer(table: threads.ThreadTable, engine: Engine, names: str) -> list[str]:
    """Let the threads of these names answer; their ids in the engine."""
    ids = []
    for name in names:
        request = _request(name)
        claim = table.claim(request)
        assert claim is not None
        thread = engine.thread(claim.entry.key.thread)
        thread.generate(request.messages, max_new_tokens=2)
        table.release(claim, thread, answered=True)
        if claim.source is not None:
            table.free(claim.source)
        ids.append(claim.entry.key.thread)
    return ids
