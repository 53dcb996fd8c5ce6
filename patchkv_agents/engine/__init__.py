"""The engine: exact prefill, suspend, recovery and generation on a Transformers model.

The public names are imported at first use, so that loading a tokenizer does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchkv_agents.lazy import lazy_exports

if TYPE_CHECKING:
    from patchkv_agents.engine.engine import Engine
    from patchkv_agents.engine.reply import Reply, StreamChunk
    from patchkv_agents.engine.thread import Thread

__all__ = ["Engine", "Reply", "StreamChunk", "Thread"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Engine": "patchkv_agents.engine.engine",
        "Reply": "patchkv_agents.engine.reply",
        "StreamChunk": "patchkv_agents.engine.reply",
        "Thread": "patchkv_agents.engine.thread",
    },
)
