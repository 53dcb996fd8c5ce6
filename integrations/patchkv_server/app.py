"""The application: its routes, and what it does at start and end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from patchkv_server import page
from patchkv_server.activity import Activity
from patchkv_server.auth import ApiKeys
from patchkv_server.completions import Completions
from patchkv_server.errors import ApiError, api_error
from patchkv_server.metrics import TenantMetrics
from patchkv_server.service import Service, log_failure
from patchkv_server.settings import ServerSettings

if TYPE_CHECKING:
    from patchkv_agents.checkpoint.stores import CheckpointStore
    from patchkv_agents.engine import Engine
    from patchkv_agents.engine.outcomes import CallOutcome, Observer


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
    complete = Completions(service, keys, models)

    @app.post("/v1/chat/completions")
    async def completions(request: Request) -> Response:
        try:
            return await complete(request)
        except Exception as error:  # passed on, uvicorn would log what it says
            told = api_error(error)
            if told is not error:
                log_failure("a request failed", error, settings.log_content)
            raise told from None

    @app.get("/v1/models")
    def list_models(request: Request) -> dict[str, Any]:
        keys.tenant(request.headers)
        return {"object": "list", "data": [_model(models[0], engine, created)]}

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

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        told = ApiError(error.status_code, str(error.detail), headers=error.headers)
        return JSONResponse(told.body(), told.status, headers=told.headers)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:
        log_failure("a request failed", error, settings.log_content)
        return JSONResponse(api_error(ApiError(500, "the server failed")).body(), 500)

    app.add_middleware(_Counting, metrics=metrics, keys=keys)
    return app


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
        "max_model_len": engine.max_tokens,
    }
