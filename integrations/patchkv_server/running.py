"""Runs the application, and ends it in order."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import HANDLED_SIGNALS

from patchkv_agents.errors import PatchKVError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from patchkv_server.service import Service

GRACE_S = 10.0
"""Seconds that answers under way have to end, once the server is told to stop."""


class AppServer(uvicorn.Server):
    """Serves one application. Told to stop, it lets answers under way end, for a while.

    Args:
        app: of `create_app`.
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        grace_s: after so many seconds, answers under way end with an error.
    """

    def __init__(self, app: FastAPI, host: str, port: int, *, grace_s: float = GRACE_S) -> None:
        service: Service = app.state.service
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=2,
                http=partial(_Protocol, service.settings.body_timeout_s),  # type: ignore[arg-type]
            )
        )
        self._service = service
        self._grace_s = grace_s

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to stop, also by SIGINT or SIGTERM, and return.

        A second SIGINT ends answers under way at once.

        Raises:
            PatchKVError: it could not start, such as where the port is taken.
        """
        before = {}
        if threading.current_thread() is threading.main_thread():
            # Having ended, uvicorn raises the signals again that it was stopped by.
            before = {number: signal.signal(number, _ignore) for number in HANDLED_SIGNALS}
        try:
            super().run(sockets)
        except SystemExit:  # how uvicorn reports that; the log has the reason
            raise PatchKVError(
                f"the server could not start at {self.config.host}, port {self.config.port}: see "
                "the error above, and free the port or choose another one with --port"
            ) from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End answers, connections and the application, in this order."""
        await self._service.finish(self._grace_s, lambda: self.force_exit)
        self.force_exit = False  # what is left takes little time, and stores the threads
        await super().shutdown(sockets)


class _Protocol(H11Protocol):
    """HTTP/1.1 on one connection, which is closed where headers do not arrive in time."""

    def __init__(self, timeout_s: float, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _time(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # the headers are there
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._timeout_s, self._close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self.transport.write(
            b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        )
        self.transport.close()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing upon a signal. Unlike `SIG_IGN`, child processes do not inherit it."""
