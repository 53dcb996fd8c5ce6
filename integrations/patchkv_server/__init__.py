"""An OpenAI-compatible server over one engine: edited conversations are recovered.

Needs the extra `server`. The public names are imported at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchkv_server.app import create_app
    from patchkv_server.auth import ApiKeys
    from patchkv_server.settings import ServerSettings

__all__ = ["ApiKeys", "ServerSettings", "create_app"]

_MODULE_OF = {
    "ApiKeys": "patchkv_server.auth",
    "ServerSettings": "patchkv_server.settings",
    "create_app": "patchkv_server.app",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
