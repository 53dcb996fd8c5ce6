"""Recover the KV cache after an edit of an agent's context, instead of prefilling it again.

The public names are imported at first use: importing this package loads neither torch nor
transformers, so that command lines and tools which only look at contexts stay fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchkv_agents.lazy import lazy_exports

if TYPE_CHECKING:
    from patchkv_agents.context import ContextHistory, Edit, EditKind
    from patchkv_agents.engine import Engine, Thread
    from patchkv_agents.recovery import RecoveryPolicy
    from patchkv_agents.recovery.profile import Profile

__version__ = "0.1.0"

__all__ = ["ContextHistory", "Edit", "EditKind", "Engine", "Profile", "RecoveryPolicy", "Thread"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ContextHistory": "patchkv_agents.context",
        "Edit": "patchkv_agents.context",
        "EditKind": "patchkv_agents.context",
        "Engine": "patchkv_agents.engine",
        "Profile": "patchkv_agents.recovery.profile",
        "RecoveryPolicy": "patchkv_agents.recovery",
        "Thread": "patchkv_agents.engine",
    },
)
