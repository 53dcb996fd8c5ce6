"""A server on a free port of this machine, with a tiny engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from openai import OpenAI

from patchkv_agents.engine import Engine
from patchkv_server import ApiKeys, ServerSettings, create_app
from patchkv_server.running import AppServer
from patchkv_server.service import Service

MODEL = "tiny"


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    app: FastAPI
    closing: ExitStack = field(default_factory=ExitStack)
    """Is closed with the server."""

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service

    @property
    def engine(self) -> Engine:
        return self.service.engine

    def client(self, key: str = "none", **options: Any) -> OpenAI:
        """The official client; it is closed with the server."""
        client = OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)
        return self.closing.enter_context(client)


@contextmanager
def serving(
    engine: Engine, settings: ServerSettings | None = None, keys: Sequence[str] = (), **more: Any
) -> Iterator[Served]:
    app = create_app(engine, settings, ApiKeys(keys), model=MODEL, **more)
    server = AppServer(app, "127.0.0.1", 0, grace_s=0.1)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    served = Served(f"http://127.0.0.1:{port}", app)
    try:
        yield served
    finally:
        server.should_exit = True
        thread.join(20)
        served.closing.close()
        assert not thread.is_alive(), "the server does not end"


def until(is_so: Any, *, within_s: float = 20.0) -> None:
    """Wait for something that happens elsewhere."""
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.005)


def talk(name: str, turns: int = 6, system: str = "You help.") -> list[dict[str, Any]]:
    """A conversation of its own, of some 40 tokens a turn."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"{name} asks in turn {turn} about item {turn * 7}."},
            {"role": "assistant", "content": f"{name}, item {turn * 7} is on shelf {turn + 3}."},
        ]
    return [*messages, {"role": "user", "content": f"Where does {name} find all of these?"}]
