"""Token alignment of two versions of a context: runs, hunks, position map. NumPy only."""

from __future__ import annotations

from patchkv_agents.alignment.matching import align
from patchkv_agents.alignment.result import Alignment, Hunk, Run

__all__ = ["Alignment", "Hunk", "Run", "align"]
