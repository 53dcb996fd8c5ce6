"""From an edited context to a KV cache: plan, restore, report."""

from patchkv_agents.recovery.plan import RecoveryPlan, RowLabel, plan_recovery
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.report import RecoveryReport

__all__ = [
    "RecoveryPlan",
    "RecoveryPolicy",
    "RecoveryReport",
    "RowLabel",
    "plan_recovery",
]
