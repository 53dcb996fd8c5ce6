"""KV rows of a paused version, outside the model."""

from patchkv_agents.checkpoint.blocks import Extent, SourceBlock, store_rows
from patchkv_agents.checkpoint.checkpoint import Checkpoint

__all__ = ["Checkpoint", "Extent", "SourceBlock", "store_rows"]
