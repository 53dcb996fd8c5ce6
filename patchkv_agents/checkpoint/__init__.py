"""KV rows of a paused version, outside the model."""

from patchkv_agents.checkpoint.budget import MemoryBudget
from patchkv_agents.checkpoint.checkpoint import QUANTISED_ORIGIN, Checkpoint
from patchkv_agents.checkpoint.extents import Extent
from patchkv_agents.checkpoint.key import CheckpointKey
from patchkv_agents.checkpoint.versions import CheckpointVersions

__all__ = [
    "QUANTISED_ORIGIN",
    "Checkpoint",
    "CheckpointKey",
    "CheckpointVersions",
    "Extent",
    "MemoryBudget",
]
