"""Token alignment of two versions of a context: runs, hunks, position map. NumPy only."""

from __future__ import annotations

from .matching import align
from .result import Alignment, Hunk, Run

__all__ = ["Alignment", "Hunk", "Run", "align"]
