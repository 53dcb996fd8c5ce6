"""The live page, the state that it polls, and `/metrics`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request, Response

from patchkv_server.activity import Activity
from patchkv_server.gauges import Gauges
from patchkv_server.metrics import TenantMetrics

Viewer = Callable[[Request], str | None]
"""The tenant whose threads and figures a request may see; None sees all.

Raises an `ApiError`: 401 where a key is missing or wrong, 403 where there are no keys and the
request was made to another name than this machine's (by a web page that stands for it).
"""

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_FILES = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


def router(activity: Activity, gauges: Gauges, metrics: TenantMetrics, viewer: Viewer) -> APIRouter:
    """Routes: `/` and its files, `/patchkv/state`, `/metrics`.

    The page and its files hold nothing secret and need no key.
    """
    routes = APIRouter(include_in_schema=False)
    for path, (name, media_type) in _FILES.items():
        routes.add_api_route(path, _serving(name, media_type), methods=["GET"])

    @routes.get("/patchkv/state")
    def state(request: Request, response: Response, thread: int | None = None) -> dict[str, Any]:
        seen = activity.state(gauges, viewer(request), thread)
        response.headers.update(_HEADERS)
        return seen

    @routes.get("/metrics")
    def prometheus(request: Request) -> Response:
        visible = metrics.visible_to(viewer(request))
        return Response(visible.text(), headers={"Content-Type": visible.content_type})

    return routes


def _serving(name: str, media_type: str) -> Callable[[], Response]:
    content = files(__package__).joinpath(name).read_bytes()

    def serve() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return serve
