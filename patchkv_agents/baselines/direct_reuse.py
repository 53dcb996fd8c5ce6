"""Direct reuse: compute the new tokens and the last one, move everything else, repair nothing.

What PIE (arXiv 2407.03157) and llama.cpp's KV shift do. Rows are moved one by one, so no token at
a block's border needs computing.
"""

from __future__ import annotations

from patchkv_agents.recovery import RecoveryPolicy

DIRECT_REUSE = RecoveryPolicy(
    "direct_reuse", window_tokens=0, attention_fraction=0.0, tail_tokens=1, block_size=1
)
