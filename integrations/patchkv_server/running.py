"""Runs the application, and ends it in order."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import uvicorn

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
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=2,
            )
        )
        self._service: Service = app.state.service
        self._grace_s = grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End answers, connections and the application, in this order."""
        await self._service.finish(self._grace_s)
        await super().shutdown(sockets)
