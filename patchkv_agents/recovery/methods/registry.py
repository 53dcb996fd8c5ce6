"""The methods by name. A new one is a file beside this one and an entry here."""

from __future__ import annotations

from patchkv_agents.recovery.methods.base import Method
from patchkv_agents.recovery.methods.cacheblend import BlendMask, CacheBlend
from patchkv_agents.recovery.methods.direct_reuse import DirectReuse
from patchkv_agents.recovery.methods.exact import Exact
from patchkv_agents.recovery.methods.published import Published
from patchkv_agents.recovery.methods.rules import Combined
from patchkv_agents.recovery.methods.window import Window

METHODS: dict[str, Method] = {
    "prefix_cache": Exact(),
    "direct_reuse": DirectReuse(),
    "cacheblend": CacheBlend(),
    # The attention mask of its public code, in which rows see later keys. For comparison only.
    "cacheblend_released": CacheBlend(mask=BlendMask.BOTTOM_RIGHT),
    "patchkv_published": Published(),
    "patchkv": Window(64, tail_tokens=64, block_size=1, rule=Combined(0.06), max_repaired=0.125),
}
"""Each with its default numbers.

Of `patchkv`, rows are recomputed one by one: grown to whole blocks, a third more of them bought
nothing. Window and tail are as good as the best where nothing behind the edit repeats what was
edited. Where something does (a note, an earlier answer, a plan), only the few rows that received
much attention and looked at the edit help: without them the divergence of the first token was up to
60 times larger on Qwen2.5-Coder-0.5B. A profile fitted to the model at hand replaces the numbers.
"""

KINDS: dict[str, type[Method]] = {method.kind: type(method) for method in METHODS.values()}
"""The classes by the name that files give them."""
