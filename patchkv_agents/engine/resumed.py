"""What one resume of a sequence gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from patchkv_agents.recovery.plan import RecoveryPlan


@dataclass(frozen=True, slots=True, eq=False)
class Resumed:
    """Outcome of one resume.

    Attributes:
        logits: of the last token, `[vocab]`.
        plan: what was kept, restored and computed.
        resumed_from: name of the version from which state was taken, or None.
        trouble: why state that should have been there was not, or None.
        restored_formats: rows that were read from stored payload, by format.
        payload_bytes: bytes of the source blocks that were read.
    """

    logits: torch.Tensor
    plan: RecoveryPlan
    resumed_from: str | None
    trouble: str | None
    restored_formats: Mapping[str, int]
    payload_bytes: int
