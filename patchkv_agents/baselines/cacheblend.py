"""CacheBlend (arXiv 2405.16444): recompute the rows whose values the edit changed most.

From the stale state of the whole old context, moved: layer 0 runs for every row behind the exact
prefix, the check layer (1) scores the suffix by the squared difference of its values, and from
there on the top 16 % run, with the new tokens and the query tail. The public code takes the whole
question as tail; an edited context often ends with an old question, so that here the last 32
tokens are taken, about the length of a question.
"""

from __future__ import annotations

from patchkv_agents.recovery import BlendPolicy, RecoveryPolicy

CACHEBLEND = RecoveryPolicy(
    "cacheblend",
    window_tokens=0,
    attention_fraction=0.0,
    tail_tokens=32,
    block_size=1,
    blend=BlendPolicy(),
)
