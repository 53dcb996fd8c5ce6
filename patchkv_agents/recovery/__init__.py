"""From an edited context to a KV cache: plan, restore, report."""

from patchkv_agents.recovery.methods import (
    BlendMask,
    BlendScore,
    CacheBlend,
    DirectReuse,
    Exact,
    Method,
    Published,
    Window,
)
from patchkv_agents.recovery.methods.rules import (
    Blocks,
    Combined,
    Contiguous,
    Edited,
    Question,
    Tokens,
)
from patchkv_agents.recovery.methods.window import WindowModel
from patchkv_agents.recovery.plan import RecoveryPlan, RowLabel
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.report import RecoveryReport
from patchkv_agents.recovery.setup import RecoverySetup

__all__ = [
    "BlendMask",
    "BlendScore",
    "Blocks",
    "CacheBlend",
    "Combined",
    "Contiguous",
    "DirectReuse",
    "Edited",
    "Exact",
    "Method",
    "Published",
    "Question",
    "RecoveryPlan",
    "RecoveryPolicy",
    "RecoveryReport",
    "RecoverySetup",
    "RowLabel",
    "Tokens",
    "Window",
    "WindowModel",
]
