"""Token alignment of two versions: runs, hunks, moves, position map. NumPy only."""

from __future__ import annotations

from patchkv_agents.alignment.anchors import Anchor, Span
from patchkv_agents.alignment.matching import align
from patchkv_agents.alignment.result import Alignment, Hunk, Run

__all__ = ["Alignment", "Anchor", "Hunk", "Run", "Span", "align"]
