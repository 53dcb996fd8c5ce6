"""Recover the KV cache after an edit of an agent's context, instead of prefilling it again.

The public names are imported at first use: importing this package loads neither torch nor
transformers, so that command lines and tools which only look at contexts stay fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchkv_agents.context import ContextHistory, Edit, EditKind
    from patchkv_agents.engine import Engine, Thread
    from patchkv_agents.recovery import RecoveryPolicy

__version__ = "0.1.0"

__all__ = ["ContextHistory", "Edit", "EditKind", "Engine", "RecoveryPolicy", "Thread"]

_MODULE_OF = {
    "ContextHistory": "patchkv_agents.context",
    "Edit": "patchkv_agents.context",
    "EditKind": "patchkv_agents.context",
    "Engine": "patchkv_agents.engine",
    "RecoveryPolicy": "patchkv_agents.recovery",
    "Thread": "patchkv_agents.engine",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
