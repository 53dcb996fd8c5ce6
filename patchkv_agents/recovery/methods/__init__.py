"""Recovery methods, one a file: which old rows are computed again, and how rows run."""

from patchkv_agents.recovery.methods.base import Method, OldRows, Repair, RowRunner
from patchkv_agents.recovery.methods.cacheblend import BlendMask, BlendScore, CacheBlend
from patchkv_agents.recovery.methods.direct_reuse import DirectReuse
from patchkv_agents.recovery.methods.exact import Exact
from patchkv_agents.recovery.methods.published import Published
from patchkv_agents.recovery.methods.window import Window

__all__ = [
    "BlendMask",
    "BlendScore",
    "CacheBlend",
    "DirectReuse",
    "Exact",
    "Method",
    "OldRows",
    "Published",
    "Repair",
    "RowRunner",
    "Window",
]
