"""The engine: exact prefill, suspend, recovery and generation on a Transformers model.

The public names are imported at first use, so that loading a tokenizer does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchkv_agents.engine.engine import Engine
    from patchkv_agents.engine.reply import Reply, StreamChunk
    from patchkv_agents.engine.thread import Thread

__all__ = ["Engine", "Reply", "StreamChunk", "Thread"]

_MODULE_OF = {
    "Engine": "patchkv_agents.engine.engine",
    "Reply": "patchkv_agents.engine.reply",
    "StreamChunk": "patchkv_agents.engine.reply",
    "Thread": "patchkv_agents.engine.thread",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
