"""Queueing, cancelling, times, and many clients at once."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from patchkv_agents.checkpoint.stores import open_store
from patchkv_agents.context import SQLiteHistoryStore
from patchkv_agents.engine import Thread
from patchkv_agents.errors import PatchKVError
from patchkv_server import ServerSettings, create_app, openai_api
from patchkv_server.chat_answers import ChatWriter
from patchkv_server.queueing import FairQueue
from patchkv_server.running import GRACE_S, AppServer

from .conftest import NewEngine
from .serving import MODEL, Served, serving, talk, until

ONE = ServerSettings(max_running=1, max_waiting=1)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds each answer back behind its first piece until it is set."""
    opened = threading.Event()
    stream = Thread.stream

    def held(self: Thread, *args: Any, **options: Any) -> Any:
        chunks = stream(self, *args, **options)

        def gated() -> Any:
            try:
                for number, chunk in enumerate(chunks):
                    if number == 1:
                        opened.wait(20)
                    yield chunk
            finally:
                chunks.close()  # type: ignore[attr-defined]

        return gated()

    monkeypatch.setattr(Thread, "stream", held)
    yield opened
    opened.set()


def ask(served: Served, name: str, key: str = "none", **options: Any) -> Any:
    options = {"max_tokens": 6, "temperature": 0, **options}
    client = served.client(key)
    return client.chat.completions.create(model=MODEL, messages=talk(name), **options)


def in_background(job: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(job())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_bounded_waiting(new_engine: NewEngine, gate: threading.Event) -> None:
    with serving(new_engine(), ONE) as served:
        jobs = []
        for number, name in enumerate(("Ann", "Bob")):
            jobs.append(in_background(lambda name=name: ask(served, name)))
            until(lambda n=number: sum(_lengths(served)) == n + 1)
        with pytest.raises(openai.RateLimitError) as caught:
            ask(served, "Cleo")
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert _lengths(served) == (1, 1)
        gate.set()
        for thread, results in jobs:
            thread.join(20)
            assert results[0].choices


def test_another_tenant_takes_a_place_in_a_full_queue(
    new_engine: NewEngine, gate: threading.Event
) -> None:
    settings = ServerSettings(max_running=1, max_waiting=2)
    with serving(new_engine(), settings, keys=["ann:secret-key-1", "bob:secret-key-2"]) as served:
        jobs = []
        for number, name in enumerate(("A", "B", "C")):
            jobs.append(in_background(lambda name=name: ask(served, name, "secret-key-1")))
            until(lambda n=number: sum(_lengths(served)) == n + 1)
        jobs.append(in_background(lambda: ask(served, "D", "secret-key-2")))
        thread, refused = jobs.pop(2)
        thread.join(20)
        assert isinstance(refused[0], openai.RateLimitError)
        assert _lengths(served) == (2, 1)
        gate.set()
        for thread, results in jobs:
            thread.join(20)
            assert results[0].choices


def _lengths(served: Served) -> tuple[int, int]:
    queue = served.service.queue()
    return queue.waiting, queue.running


def test_a_client_that_goes_away(new_engine: NewEngine, gate: threading.Event) -> None:
    """Streaming, whole, and still waiting."""
    with serving(new_engine(), ServerSettings(max_running=1)) as served:
        stream = ask(served, "Ann", stream=True)
        next(iter(stream))
        waiting, _ = in_background(lambda: ask(served, "Bob", timeout=0.3))
        waiting.join(20)
        until(lambda: _lengths(served) == (0, 1))
        stream.close()
        gate.set()
        until(lambda: _lengths(served) == (0, 0))
        gate.clear()
        whole, results = in_background(lambda: ask(served, "Cleo", timeout=0.3))
        whole.join(20)
        assert isinstance(results[0], openai.APITimeoutError)
        gate.set()
        until(lambda: _lengths(served) == (0, 0))
        assert b"patchkv_cancellations_total 3.0" in _metrics(served)
        assert ask(served, "Ann").recovery["cache_read"] > 0  # what was prefilled is not lost


def test_a_repeated_request_waits_for_what_is_computed(
    new_engine: NewEngine, gate: threading.Event
) -> None:
    with serving(new_engine()) as served:
        long = "Ann " * 60
        jobs = [in_background(lambda: ask(served, long)) for _ in range(2)]
        until(lambda: _lengths(served) == (1, 1))
        ask_other, other = in_background(lambda: ask(served, "Bob"))
        until(lambda: _lengths(served) == (1, 2))  # others go on
        gate.set()
        for thread, _ in [*jobs, (ask_other, other)]:
            thread.join(20)
        computed = sorted(r[0].recovery["tokens"] - r[0].recovery["cache_read"] for _, r in jobs)
        assert computed[0] == 1
        assert len({results[0].recovery["thread"] for _, results in jobs}) == 1


def test_time_is_up(new_engine: NewEngine, gate: threading.Event) -> None:
    with serving(new_engine(), ServerSettings(timeout_s=0.5, keep_alive_s=0.1)) as served:
        with pytest.raises(openai.InternalServerError) as caught:
            ask(served, "Ann")
        assert caught.value.status_code == 504
        body = {"model": MODEL, "messages": talk("Bob"), "stream": True, "max_tokens": 6}
        lines = httpx.post(f"{served.url}/v1/chat/completions", json=body).text
        assert ": still there" in lines
        assert '"code": "timeout"' in lines
        assert "[DONE]" not in lines
        with pytest.raises(openai.APIError, match="no whole answer"):
            list(ask(served, "Cleo", stream=True))
        gate.set()


def test_a_body_that_does_not_arrive(new_engine: NewEngine) -> None:
    with serving(new_engine(), ServerSettings(body_timeout_s=0.2)) as served:
        address = httpx.URL(served.url)
        with socket.create_connection((address.host, address.port or 0), timeout=20) as connection:
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            answer = b"".join(iter(lambda: connection.recv(4096), b""))  # until it is closed
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"timeout"' in answer


_LONG_PARTS = [{"type": "text", "text": "Many words. " * 500_000} for _ in range(2)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": _LONG_PARTS}]}),
        ("messages", {"messages": [{"role": "user", "content": "Hi."}], "system": _LONG_PARTS}),
        ("responses", {"input": "Hi.", "instructions": _LONG_PARTS[0]["text"]}),
    ],
)
def test_a_context_that_is_far_too_long_is_refused_before_the_work(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """15 MB of text took 31 to 108 s and 3.6 GB of memory before they were refused.

    Instructions beside the messages were not counted, and still took the time.
    """
    engine, encoded = new_engine(), []
    call = type(engine.tokenizer).__call__

    def counting(self: Any, text: Any, *args: Any, **options: Any) -> Any:
        encoded.append(len(text))
        return call(self, text, *args, **options)

    monkeypatch.setattr(type(engine.tokenizer), "__call__", counting)
    body = {"model": MODEL, "max_tokens": 4, **body}
    with serving(engine) as served:
        answer = httpx.post(f"{served.url}/v1/{path}", json=body, timeout=20)
    assert answer.status_code == 400
    assert answer.json()["error"].get("code") in ("context_length_exceeded", None)
    assert "maximum context length is 8192 tokens" in answer.json()["error"]["message"]
    assert sum(encoded) < 200_000  # of 12 million characters


def test_a_prompt_of_many_token_ids(new_engine: NewEngine) -> None:
    """Each of the ids was an error of its own: 500,000 took 18 s."""
    body = {"model": MODEL, "prompt": [1] * 100_000}
    with serving(new_engine()) as served:
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=20)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("prompt has to be one text")


@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
@pytest.mark.parametrize("half", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc"])
def test_headers_that_do_not_arrive(new_engine: NewEngine, first: bytes, half: bytes) -> None:
    """Half-sent headers held a connection for as long as the client liked."""
    if first and not half:
        pytest.skip("an idle connection that was used is kept alive for a while")
    with serving(new_engine(), ServerSettings(body_timeout_s=0.2)) as served:
        address = httpx.URL(served.url)
        with socket.create_connection((address.host, address.port or 0), timeout=20) as connection:
            connection.sendall(first + half)
            answer = b"".join(iter(lambda: connection.recv(4096), b""))  # until it is closed
        assert b"HTTP/1.1 408 " in answer
        assert (b'"status":"ok"' in answer) == bool(first)


@pytest.mark.parametrize("broken", ["engine", "reading", "writing"])
def test_an_internal_error_tells_nothing(
    new_engine: NewEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    """What went wrong outside of the engine was logged with its words, by uvicorn."""

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError(f"cannot do {talk('Ann')}")

    if broken == "engine":
        monkeypatch.setattr(Thread, "stream", fail)
    elif broken == "reading":
        monkeypatch.setattr(openai_api, "read_chat", fail)
    else:
        monkeypatch.setattr(ChatWriter, "whole", fail)
        monkeypatch.setattr(ChatWriter, "end", fail)
    with serving(new_engine()) as served:
        with pytest.raises(openai.InternalServerError) as caught:
            ask(served, "Ann")
        with pytest.raises(openai.APIError):
            list(ask(served, "Bob", stream=True))
    assert "shelf" not in str(caught.value)
    assert "RuntimeError" in caplog.text
    assert "shelf" not in caplog.text


def test_nothing_of_a_prompt_is_logged(
    new_engine: NewEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with serving(new_engine(), ServerSettings(idle_suspend_s=0.1)) as served:
        text = ask(served, "Ann").choices[0].message.content
        with pytest.raises(openai.BadRequestError):
            ask(served, "Ann " * 9000)
        until(lambda: "suspended" in served.service.places().values())
    logged = "\n".join(
        record.getMessage() for record in caplog.records if not record.name.startswith("openai")
    )
    assert "patchkv_server" in {record.name.partition(".")[0] for record in caplog.records}
    assert "shelf" not in logged
    assert text not in logged


def test_the_server_ends_while_it_answers(new_engine: NewEngine, gate: threading.Event) -> None:
    with serving(new_engine(), ServerSettings(max_running=1)) as served:
        stream = iter(ask(served, "Ann", stream=True))
        next(stream)
        waiting, results = in_background(lambda: ask(served, "Bob"))
        until(lambda: _lengths(served) == (1, 1))
        reading, pieces = in_background(lambda: list(stream))
        threading.Timer(0.5, gate.set).start()  # a step of the model is not broken off
    waiting.join(20)
    assert isinstance(results[0], openai.InternalServerError)
    assert results[0].code == "shutting_down"
    reading.join(20)
    assert isinstance(pieces[0], openai.APIError)
    assert "shutting down" in pieces[0].message


@pytest.mark.parametrize("times", [1, 2])
def test_told_to_stop_by_signals(new_engine: NewEngine, tmp_path: Path, times: int) -> None:
    """The server let answers end, and then died of the very signal before it closed its stores.
    A second Ctrl+C waited as long as one does."""
    store = open_store(tmp_path / "kv")
    app = create_app(new_engine(store=store), model=MODEL, store=store)
    server = AppServer(app, "127.0.0.1", 0)
    escaped: list[int] = []
    got: list[Any] = []

    def client() -> None:
        until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        with ExitStack() as closing:
            served = Served(f"http://127.0.0.1:{port}", app, closing)
            stream = iter(ask(served, "Ann", stream=True, max_tokens=20 if times == 1 else 6000))
            next(stream)
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                until(lambda: server.should_exit)
            got.extend(chunk.choices[0].finish_reason for chunk in stream)

    def asking() -> None:
        try:
            client()
        except Exception as error:
            got.append(str(error))
        finally:
            server.should_exit = True  # whatever has gone wrong

    before = signal.signal(signal.SIGINT, lambda number, frame: escaped.append(number))
    try:
        thread = threading.Thread(target=asking)
        thread.start()
        started = time.monotonic()
        server.run()
        thread.join(20)
    finally:
        signal.signal(signal.SIGINT, before)
    assert escaped == []
    assert got[-1] == ("length" if times == 1 else "the server is shutting down")
    assert time.monotonic() - started < GRACE_S
    assert store.stats().checkpoints == 1


def test_a_port_that_is_taken(new_engine: NewEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = AppServer(create_app(new_engine(), model=MODEL), *other.getsockname())
        with pytest.raises(PatchKVError, match="could not start at 127.0.0.1"):
            server.run()


def test_fair_among_tenants() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for item in ("a1", "a2", "a3", "b1", "c1"):
        assert queue.put(item[0], item) is None
    order = []
    while (taken := queue.take(lambda item: item)) is not None:
        order.append(taken[0])
        queue.done(taken[0][0])
    assert order == ["a1", "b1", "c1", "a2", "a3"]


def test_who_has_less_running_goes_first() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for item in ("a1", "a2", "b1", "b2"):
        queue.put(item[0], item)
    free = {"a1", "a2", "b2"}  # b1 waits for its thread
    taken = [queue.take(lambda item: item if item in free else None) for _ in range(3)]
    assert [item and item[0] for item in taken] == ["a1", "b2", "a2"]
    assert [*queue] == ["b1"]
    assert FairQueue(0).put("a", "a1") == "a1"


def test_a_tenant_that_fills_the_queue_makes_room_for_others() -> None:
    """One tenant's waiting requests had every other tenant refused."""
    queue: FairQueue[str] = FairQueue(4)
    for item in ("a1", "a2", "a3", "a4"):
        assert queue.put("a", item) is None
    assert queue.put("a", "a5") == "a5"
    assert queue.put("b", "b1") == "a4"
    assert queue.put("b", "b2") == "a3"
    assert queue.put("b", "b3") == "b3"  # the other one has not more waiting
    assert queue.put("c", "c1") == "a2"
    assert sorted(queue) == ["a1", "b1", "b2", "c1"]


def load(served: Served, seconds: float, clients: int = 8) -> int:
    """Clients that go on with, edit and begin conversations. Some answers are checked.

    Returns:
        How many answers there were.
    """
    answered: list[tuple[list[dict[str, Any]], str]] = []
    errors: list[BaseException] = []
    end = time.monotonic() + seconds

    def run(number: int) -> None:
        chance = random.Random(number)
        client = served.client(timeout=60)
        try:
            while time.monotonic() < end:
                messages = talk(f"Client {number}", chance.randint(1, 6))
                for _ in range(3):
                    reply = client.chat.completions.create(
                        model=MODEL,
                        messages=messages,  # type: ignore[arg-type]
                        max_tokens=6,
                        temperature=0,
                    )
                    answered.append((messages, str(reply.choices[0].message.content)))
                    messages = [*messages, {"role": "assistant", "content": "On it."}]
                    if chance.random() < 0.5:
                        messages[2] = {"role": "assistant", "content": f"Sold {chance.random()}."}
                    messages.append({"role": "user", "content": f"And {number}?"})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
        assert not thread.is_alive(), "a request hangs"
    assert not errors, errors[0]
    until(lambda: _lengths(served) == (0, 0))
    alone = type(served.engine)(served.engine.adapter.model, served.engine.tokenizer)
    for number, (messages, text) in enumerate(random.Random(0).sample(answered, 12)):
        expected = alone.thread(f"t{number}").generate(messages, max_new_tokens=6).text
        assert text == expected, "another conversation's answer"
    return len(answered)


def test_many_clients(new_engine: NewEngine) -> None:
    budget = 6 * 2**20
    settings = ServerSettings(memory_budget_bytes=budget, idle_suspend_s=0.5)
    with serving(new_engine(), settings) as served:
        assert load(served, 3.0) > 16
        until(lambda: sum(served.service.threads.memory()) <= budget)


@pytest.mark.slow
def test_soak(new_engine: NewEngine, smollm2_model: Any, smollm2_tokenizer: Any) -> None:
    """Five minutes with the embedded model, or `PATCHKV_SOAK_S` seconds."""
    from patchkv_agents.engine import Engine

    budget = 2**30
    settings = ServerSettings(memory_budget_bytes=budget, idle_suspend_s=2.0)
    with serving(Engine(smollm2_model, smollm2_tokenizer), settings) as served:
        assert load(served, float(os.environ.get("PATCHKV_SOAK_S", "300"))) > 16
        until(lambda: sum(served.service.threads.memory()) <= budget)


def test_killed_while_it_streams(new_engine: NewEngine, tmp_path: Path) -> None:
    """Another process goes on with what was stored."""
    engine = new_engine()
    engine.adapter.model.save_pretrained(tmp_path / "model")
    engine.tokenizer.save_pretrained(tmp_path / "model")
    port = _free_port()
    child = Served(f"http://127.0.0.1:{port}", FastAPI())
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "patchkv_agents.cli.main", "serve", str(tmp_path / "model")),
            *("--port", str(port), "--model-name", MODEL, "--idle-suspend-s", "0.1"),
            *("--store", str(tmp_path / "kv"), "--history", str(tmp_path / "history.db")),
        ]
    )
    try:
        until(lambda: _is_healthy(child), within_s=60)
        first = ask(child, "Ann").recovery
        until(lambda: b'patchkv_threads{place="suspended"} 1.0' in _metrics(child))
        stream = iter(ask(child, "Bob Lee", stream=True, max_tokens=500))
        for _ in range(3):
            next(stream)
    finally:
        process.kill()
        process.wait(20)
        child.closing.close()
    store = open_store(tmp_path / "kv")
    again = new_engine(store=store, history=SQLiteHistoryStore(tmp_path / "history.db"))
    with serving(again, store=store) as served:
        for name in ("Ann", "Bob Lee"):
            reply = ask(served, name)
            alone = new_engine().thread("t").generate(talk(name), max_new_tokens=6)
            assert reply.choices[0].message.content == alone.text
            assert reply.recovery["fallback_reason"] is None
            if name == "Ann":
                assert reply.recovery["thread"] == first["thread"]
                assert reply.recovery["cache_read"] == first["tokens"] - 1


def _metrics(served: Served) -> bytes:
    return httpx.get(f"{served.url}/metrics").content


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _is_healthy(served: Served) -> bool:
    try:
        return httpx.get(f"{served.url}/health").status_code == 200
    except httpx.TransportError:
        return False
