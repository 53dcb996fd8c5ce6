"""Watches what other middleware does to the messages, without changing what it does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

from langchain.agents.middleware import AgentMiddleware, ModelRequest

STATE_HOOKS = ("before_agent", "before_model", "after_model", "after_agent")

OnUpdate = Callable[[str, Any, Any, Any], None]
"""Takes the name of a middleware, the state, the update that it returned, and the runtime."""
OnRequest = Callable[[str, ModelRequest[Any], ModelRequest[Any]], None]
"""Takes the name of a middleware, the request that it got, and the one that it passed on."""

Hook = Callable[..., Any]


def watched(
    middleware: AgentMiddleware[Any, Any, Any], on_update: OnUpdate, on_request: OnRequest
) -> AgentMiddleware[Any, Any, Any]:
    """A shallow copy of `middleware` that reports what it does to the messages.

    The copy has the same class and name, and only hooks that the class has are watched, so that
    the agent's graph is the same with it.
    """
    copied = copy.copy(middleware)
    for hook in STATE_HOOKS:
        for name, watch in ((hook, _watch_update), (f"a{hook}", _watch_async_update)):
            if _has(middleware, name):
                setattr(copied, name, watch(getattr(copied, name), copied.name, on_update))
    for name, watch_call in (
        ("wrap_model_call", _watch_request),
        ("awrap_model_call", _watch_async_request),
    ):
        if _has(middleware, name):
            setattr(copied, name, watch_call(getattr(copied, name), copied.name, on_request))
    return copied


def _has(middleware: AgentMiddleware[Any, Any, Any], name: str) -> bool:
    return getattr(type(middleware), name) is not getattr(AgentMiddleware, name)


def _watch_update(method: Hook, author: str, on_update: OnUpdate) -> Hook:
    @wraps(method)
    def hook(state: Any, runtime: Any) -> Any:
        update = method(state, runtime)
        on_update(author, state, update, runtime)
        return update

    return hook


def _watch_async_update(method: Hook, author: str, on_update: OnUpdate) -> Hook:
    @wraps(method)
    async def hook(state: Any, runtime: Any) -> Any:
        update = await method(state, runtime)
        on_update(author, state, update, runtime)
        return update

    return hook


def _watch_request(method: Hook, author: str, on_request: OnRequest) -> Hook:
    @wraps(method)
    def hook(request: ModelRequest[Any], handler: Hook) -> Any:
        def passed_on(changed: ModelRequest[Any]) -> Any:
            on_request(author, request, changed)
            return handler(changed)

        return method(request, passed_on)

    return hook


def _watch_async_request(method: Hook, author: str, on_request: OnRequest) -> Hook:
    @wraps(method)
    async def hook(request: ModelRequest[Any], handler: Hook) -> Any:
        async def passed_on(changed: ModelRequest[Any]) -> Any:
            on_request(author, request, changed)
            return await handler(changed)

        return await method(request, passed_on)

    return hook
