"""What PatchKV is compared with, behind the same interface and on the same engine."""

from patchkv_agents.baselines.cacheblend import CACHEBLEND
from patchkv_agents.baselines.cacheblend_released import CACHEBLEND_RELEASED
from patchkv_agents.baselines.comparison import Comparison, MethodResult, compare_methods
from patchkv_agents.baselines.direct_reuse import DIRECT_REUSE
from patchkv_agents.baselines.prefix_cache import PREFIX_CACHE
from patchkv_agents.baselines.registry import method, method_names, setup_named

__all__ = [
    "CACHEBLEND",
    "CACHEBLEND_RELEASED",
    "DIRECT_REUSE",
    "PREFIX_CACHE",
    "Comparison",
    "MethodResult",
    "compare_methods",
    "method",
    "method_names",
    "setup_named",
]
