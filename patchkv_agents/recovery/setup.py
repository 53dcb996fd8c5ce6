"""A recovery policy and how rows are stored for it: what a method by name stands for."""

from __future__ import annotations

from dataclasses import dataclass

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.recovery.policy import RecoveryPolicy


@dataclass(frozen=True, slots=True)
class RecoverySetup:
    """What an engine needs to run a method.

    Attributes:
        policy: how edited contexts are recovered.
        storage: the formats in which rows are packed.
    """

    policy: RecoveryPolicy
    storage: PrecisionPolicy = PrecisionPolicy.lossless()

    @property
    def name(self) -> str:
        """The policy's name."""
        return self.policy.name
