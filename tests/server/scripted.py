"""A tiny engine that is observed, and the routes of its page, without the rest of the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, HTTPException, Request

from patchkv_agents.context import ThreadKey
from patchkv_agents.engine import Engine
from patchkv_agents.recovery import RecoveryPolicy
from patchkv_server.activity import Activity
from patchkv_server.gauges import MemoryByTier, Place, QueueLengths
from patchkv_server.metrics import TenantMetrics
from patchkv_server.page import router

KEYS = {"key-a": "a", "key-b": "b"}
"""API keys and their tenants."""

SECRET = "platform nine"
"""Stands in the first conversation alone."""


def conversation(*, train: str = f"leaves from {SECRET}", turns: int = 12) -> list[dict[str, Any]]:
    """A conversation whose second message is a tool's result about a train."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "When does my train leave, and from where?"},
        {"role": "tool", "content": f"The 7:40 to York {train}.", "tool_call_id": "call-1"},
    ]
    for turn in range(turns):
        messages += [
            {"role": "assistant", "content": f"Noted, point {turn}: the morning is free."},
            {"role": "user", "content": f"And what should I bring along for stop number {turn}?"},
        ]
    return messages


@dataclass
class FixedGauges:
    """Gauges that are told what to say."""

    waiting: int = 0
    running: int = 1
    store_bytes: int | None = None
    where: dict[ThreadKey, Place] = field(default_factory=dict)

    def queue(self, tenant: str | None = None) -> QueueLengths:
        return QueueLengths(self.waiting, self.running)

    def memory(self, tenant: str | None = None) -> MemoryByTier:
        return MemoryByTier(live_bytes=3_000_000, suspended_bytes=750, store_bytes=self.store_bytes)

    def places(self, tenant: str | None = None) -> dict[ThreadKey, Place]:
        return self.where


class Scripted:
    """An observed engine, and an app with the page's routes."""

    def __init__(self, engine: Engine, *, log_content: bool = False, keys: bool = False) -> None:
        self.engine = engine
        self.metrics = TenantMetrics(KEYS.values() if keys else ())
        self.gauges = FixedGauges()
        self.activity = Activity(engine, self.metrics, self._owner, log_content=log_content)
        engine.observer = self.activity
        self.metrics.watch(self.gauges)
        self.keys = keys
        self.app = FastAPI()
        self.app.include_router(router(self.activity, self.gauges, self.metrics, self._viewer))

    def ask(
        self, messages: Sequence[dict[str, Any]], thread: str = "trip", tenant: str = "a", **options
    ) -> None:
        """Let a tenant's thread answer by the default policy."""
        options = {"policy": RecoveryPolicy.default(), "max_new_tokens": 2, **options}
        self.engine.thread(thread, namespace=tenant).generate(messages, **options)
        self.gauges.where[ThreadKey(thread, tenant)] = "live"

    def settle(self) -> None:
        """Wait until all misses so far are explained."""
        self.activity._worker.submit(lambda: None).result()

    def state(self, tenant: str | None = None, selected: int | None = None) -> dict[str, Any]:
        self.settle()
        return self.activity.state(self.gauges, tenant, selected)

    def _owner(self, key: ThreadKey) -> tuple[str, str]:
        return key.namespace, key.thread

    def _viewer(self, request: Request) -> str | None:
        if not self.keys:
            return None
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key not in KEYS:
            raise HTTPException(401, "no such key")
        return KEYS[key]
