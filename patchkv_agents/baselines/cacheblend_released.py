"""CacheBlend with the attention mask of its public code, in which rows see later keys.

The code runs the chosen rows under a causal mask aligned to the bottom right of all keys. The
rows are scattered, so that each sees keys behind its own position. For comparison only.
"""

from __future__ import annotations

from dataclasses import replace

from patchkv_agents.baselines.cacheblend import CACHEBLEND
from patchkv_agents.recovery import BlendMask, BlendPolicy

CACHEBLEND_RELEASED = replace(
    CACHEBLEND, name="cacheblend_released", blend=BlendPolicy(mask=BlendMask.BOTTOM_RIGHT)
)
