"""From an edited context to a KV cache: plan, restore, report."""

from patchkv_agents.recovery.plan import RecoveryPlan, RowLabel, plan_recovery
from patchkv_agents.recovery.policy import (
    BlendMask,
    BlendPolicy,
    BlendScore,
    RecoveryPolicy,
    Selection,
)
from patchkv_agents.recovery.report import RecoveryReport
from patchkv_agents.recovery.setup import RecoverySetup
from patchkv_agents.recovery.window import WindowModel

__all__ = [
    "BlendMask",
    "BlendPolicy",
    "BlendScore",
    "RecoveryPlan",
    "RecoveryPolicy",
    "RecoveryReport",
    "RecoverySetup",
    "RowLabel",
    "Selection",
    "WindowModel",
    "plan_recovery",
]
