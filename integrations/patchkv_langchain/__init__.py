"""PatchKV for LangChain: a chat model, and middleware for agents.

The public names are imported at first use. The chat model needs `langchain-core` only; the
middleware needs LangChain itself, which the extra `langchain` installs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchkv_agents.lazy import lazy_exports

if TYPE_CHECKING:
    from patchkv_langchain.chat import ChatPatchKV
    from patchkv_langchain.middleware import PatchKVMiddleware
    from patchkv_langchain.provider import register_provider
    from patchkv_langchain.records import declared_edits, tracked
    from patchkv_langchain.testing import ScriptedChatPatchKV

__all__ = [
    "ChatPatchKV",
    "PatchKVMiddleware",
    "ScriptedChatPatchKV",
    "declared_edits",
    "register_provider",
    "tracked",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ChatPatchKV": "patchkv_langchain.chat",
        "PatchKVMiddleware": "patchkv_langchain.middleware",
        "ScriptedChatPatchKV": "patchkv_langchain.testing",
        "declared_edits": "patchkv_langchain.records",
        "register_provider": "patchkv_langchain.provider",
        "tracked": "patchkv_langchain.records",
    },
    installed_by=dict.fromkeys(
        ("langchain", "langgraph", "langchain_core"), "patchkv-agents[langchain]"
    ),
)
