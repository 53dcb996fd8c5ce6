"""An OpenAI-compatible server over one engine: edited conversations are recovered.

Needs the extra `server`. The public names are imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchkv_agents.lazy import lazy_exports

if TYPE_CHECKING:
    from patchkv_server.app import create_app
    from patchkv_server.auth import ApiKeys
    from patchkv_server.settings import ServerSettings

__all__ = ["ApiKeys", "ServerSettings", "create_app"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ApiKeys": "patchkv_server.auth",
        "ServerSettings": "patchkv_server.settings",
        "create_app": "patchkv_server.app",
    },
)
