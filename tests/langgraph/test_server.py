"""Tracked graphs in LangGraph's own server, which refuses what blocks its event loop."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patchkv_agents.context import SQLiteHistoryStore
from patchkv_langgraph import GraphHistory

from .graphs import texts

EXAMPLE = Path(__file__).parents[2] / "examples" / "langgraph_studio"

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    """`langgraph dev`, in a copy of the example's folder."""

    def __init__(self, folder: Path) -> None:
        self.history = folder / "edits.db"
        self.log = folder / "server.log"
        self._port = free_port()
        arguments = ["dev", "--no-browser", "--no-reload", "--port", str(self._port)]
        program = Path(sys.executable).with_name("langgraph")
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [str(program), *arguments],
                cwd=folder,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "PATCHKV_HISTORY": str(self.history),
                    "LANGSMITH_TRACING": "false",
                },
                start_new_session=True,
            )
        deadline = time.monotonic() + 120
        while True:
            try:
                self.get("/ok")
                return
            except OSError:
                assert self._process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.2)

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(20)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=60) as answer:
            return json.load(answer)

    def post(self, path: str, body: Any) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("langgraph_api")
    folder = tmp_path_factory.mktemp("studio")
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    started = Server(folder)
    yield started
    started.close()


def test_a_graph_with_a_file_of_histories_runs_and_shows_its_edits(server: Server) -> None:
    """The first touch of a thread opened its history in the event loop: BlockingError."""
    thread = json.loads(server.post("/threads", {}))["thread_id"]

    def asked(text: str, **more: Any) -> str:
        given = {"messages": [{"role": "user", "content": text}]}
        body = {"assistant_id": "orders", "input": given, "stream_mode": ["values", "events"]}
        return server.post(f"/threads/{thread}/runs/stream", {**body, **more})

    first = asked("Where is order 7?")
    assert "BlockingError" not in first and "event: error" not in first, first[-2000:]
    start = json.loads(server.post(f"/threads/{thread}/history", {"limit": 1}))[0]["checkpoint"]
    second = asked("And now?")
    assert "patchkv_edit" in second and "refresh_evidence" in second

    with SQLiteHistoryStore(server.history, mode="r") as store:
        history = GraphHistory(store)
        newest = history.log(thread)[0]
        kinds = [(str(e.kind), e.author) for v in history.log(thread)[::-1] for e in v.edits]
        assert ("refresh_evidence", "look") in kinds
        state = server.get(f"/threads/{thread}/state")["values"]
        assert texts(newest) == [message["content"] for message in state["messages"]]
        plan = history.log(thread, key="plan")[0]
        assert texts(plan) == state["plan"]
        assert {str(edit.kind) for edit in plan.edits} == {"revise_plan"}
        assert set(history.open(thread).branches()) == {"main"}

    asked("Instead?", checkpoint=start)  # time travel: a branch where the first run ended
    with SQLiteHistoryStore(server.history, mode="r") as store:
        history = GraphHistory(store)
        assert set(history.open(thread).branches()) == {"main", "main-2"}
        assert "Instead?" in texts(history.log(thread)[0])
        assert "And now?" not in texts(history.log(thread)[0])
    assert "BlockingError" not in server.log.read_text()
