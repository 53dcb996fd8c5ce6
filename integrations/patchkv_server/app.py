"""The application: its routes, and what it does at start and end."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from patchkv_server import anthropic_api, openai_api, page, responses_api
from patchkv_server.activity import Activity
from patchkv_server.auth import ApiKeys
from patchkv_server.endpoint import THREAD_HEADER, Reader
from patchkv_server.errors import ApiError, api_error
from patchkv_server.metrics import TenantMetrics
from patchkv_server.service import Service
from patchkv_server.settings import ServerSettings

if TYPE_CHECKING:
    from patchkv_agents.checkpoint.stores import CheckpointStore
    from patchkv_agents.engine import Engine
    from patchkv_agents.engine.outcomes import CallOutcome, Observer

MAX_LISTED = 2000
"""Characters of an error that lists what there is."""


def create_app(
    engine: Engine,
    settings: ServerSettings | None = None,
    keys: ApiKeys | None = None,
    *,
    model: str | None = None,
    store: CheckpointStore | None = None,
) -> FastAPI:
    """An OpenAI-compatible server over an engine, as an ASGI application.

    The engine belongs to it from then on: its threads are the server's.

    Args:
        engine: answers; with its policy, stores and histories.
        settings: limits; the usual ones if left out.
        keys: API keys; without any, requests to this machine's own names are answered.
        model: name of the model for clients; the engine's if left out.
        store: the engine's checkpoint store, if it has one. Not closed.
    """
    settings, keys = settings or ServerSettings(), keys or ApiKeys()
    metrics = TenantMetrics(keys.tenants)
    service = Service(engine, settings, metrics, store)
    activity = Activity(
        engine,
        metrics=metrics,
        owner_of=service.threads.owner_of,
        log_content=settings.log_content,
    )
    engine.observer = _both(engine.observer, activity)
    metrics.watch(service)
    if engine.shadow is not None:
        metrics.total.watch_shadow(engine.shadow)
    models = tuple(dict.fromkeys([model or engine.model_name, engine.model_name]))
    created = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()
            if engine.shadow is not None:
                await asyncio.to_thread(engine.shadow.close)
            activity.close()

    app = FastAPI(
        title="PatchKV", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.service = service

    app.include_router(
        page.router(activity, service, metrics, lambda request: keys.viewer(request.headers))
    )
    reader = Reader(service, keys)
    app.include_router(openai_api.router(service, reader, models))
    app.include_router(anthropic_api.router(service, reader, models))
    app.include_router(responses_api.router(service, reader, models))

    @app.get("/v1/models")
    def list_models(request: Request) -> dict[str, Any]:
        keys.tenant(request.headers)
        data = [_model(models[0], engine, created)]
        page = {"has_more": False, "first_id": models[0], "last_id": models[0]}  # Anthropic's
        return {"object": "list", "data": data, **page}

    @app.get("/v1/models/{name:path}")
    def show_model(request: Request, name: str) -> dict[str, Any]:
        keys.tenant(request.headers)
        if name not in models:
            raise ApiError(
                404, f"the model that is served is {models[0]!r}", code="model_not_found"
            )
        return _model(models[0], engine, created)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok", "model": models[0]}

    def refusal(request: Request, error: ApiError) -> Response:
        is_anthropic = request.url.path.startswith(anthropic_api.PREFIX)
        body = error.anthropic_body() if is_anthropic else error.body()
        return JSONResponse(body, error.status, headers=error.headers)

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        return refusal(request, error)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code in (404, 405):
            paths = ", ".join(_listed(app))
            message = f"there is no {request.method} {request.url.path}: there are {paths}"
        shown = ApiError(error.status_code, message[:MAX_LISTED], headers=error.headers)
        return refusal(request, shown)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:
        return refusal(request, api_error(ApiError(500, "the server failed")))

    app.add_middleware(
        CORSMiddleware,  # for pages of this machine; others get no leave to read or to send JSON
        allow_origin_regex=r"https?://(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?",
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[THREAD_HEADER],
    )
    app.add_middleware(_Lenient)
    app.add_middleware(_Counting, metrics=metrics, keys=keys)
    return app


def _listed(app: Any) -> Iterator[str]:
    """The methods and paths of an application or router."""
    for route in app.routes:
        if isinstance(route, APIRoute):
            yield from (f"{method} {route.path}" for method in sorted(route.methods or ()))
        elif (inner := getattr(route, "original_router", None)) is not None:
            yield from _listed(inner)


class _Lenient:
    """Takes paths with needless slashes, and HEAD for GET."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = re.sub("/+", "/", scope["path"])
        path = path.rstrip("/") or "/"
        is_head = scope["method"] == "HEAD"

        async def without_body(message: Any) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        method = "GET" if is_head else scope["method"]
        scope = {**scope, "path": path, "raw_path": path.encode(), "method": method}
        await self._app(scope, receive, without_body if is_head else send)


class _Counting:
    """Counts the requests of the API by their status."""

    def __init__(self, app: Any, metrics: TenantMetrics, keys: ApiKeys) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = keys

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                for metrics in self._metrics.of(tenant):
                    metrics.request(message["status"])
            await send(message)

        is_api = scope["type"] == "http" and scope["path"].startswith("/v1/")
        tenant: str | None = None
        if is_api:
            try:
                tenant = self._keys.tenant(Headers(scope=scope))
            except ApiError:  # nobody's
                pass
        await self._app(scope, receive, counted if is_api else send)


def _both(first: Observer | None, second: Observer) -> Observer:
    if first is None:
        return second
    observers: Sequence[Observer] = first, second

    def notify(outcome: CallOutcome) -> None:
        for observer in observers:
            observer(outcome)

    return notify


def _model(name: str, engine: Engine, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "patchkv",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, timezone.utc).isoformat(),
        "max_model_len": engine.max_tokens,
    }
