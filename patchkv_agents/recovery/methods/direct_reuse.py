"""Direct reuse: compute the new tokens and the last one, move everything else, repair nothing.

What PIE (arXiv 2407.03157) and llama.cpp's KV shift do. Rows are moved one by one, so no token at
a block's border needs computing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from patchkv_agents.recovery.methods.base import Method, OldRows, Repair


@dataclass(frozen=True, slots=True)
class DirectReuse(Method):
    """Restores every old row."""

    kind: Literal["direct_reuse"] = "direct_reuse"

    def repair(self, rows: OldRows) -> Repair:
        """The last token, which gives the logits."""
        tail = rows.none()
        tail[-1] = rows.suffix[-1]
        return Repair(rows.none(), tail, rows.none())

    def expected_rows(self, *, new: int, suffix: int, layers: int) -> float:
        """The new tokens and the last one."""
        return new + min(suffix, 1)

    def describe(self) -> Iterator[str]:
        """One line."""
        yield "nothing behind an edit is recomputed but the last token"
