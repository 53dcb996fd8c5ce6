"""What PatchKV is compared with, behind the same interface and on the same engine."""

from patchkv_agents.baselines.comparison import (
    Comparison,
    MethodResult,
    compare_methods,
    first_token_kl,
)
from patchkv_agents.baselines.direct_reuse import DIRECT_REUSE
from patchkv_agents.baselines.prefix_cache import PREFIX_CACHE

__all__ = [
    "DIRECT_REUSE",
    "PREFIX_CACHE",
    "Comparison",
    "MethodResult",
    "compare_methods",
    "first_token_kl",
]
