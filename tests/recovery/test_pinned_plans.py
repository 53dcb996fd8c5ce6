"""Plans of every method and rule on 200 random cases, pinned by digests.

The digests are those of the code before methods had files of their own; a change of any label of
any case shows. Whoever means to change what a method chooses pins its new plans.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest

from patchkv_agents.alignment import align
from patchkv_agents.checkpoint.block_map import BlockMap
from patchkv_agents.recovery import (
    Blocks,
    CacheBlend,
    Combined,
    Contiguous,
    DirectReuse,
    Edited,
    Exact,
    Published,
    Question,
    Tokens,
    Window,
    WindowModel,
)

from ..engine.models import edited, random_ids

MODEL = WindowModel(0.0, (0.0, 1.4, 0.0, 0.0, 0.0, 0.0))
METHODS = {
    "exact": Exact(),
    "direct reuse": DirectReuse(),
    "cacheblend": CacheBlend(),
    "published": Published(),
    "published, predicted": Published(0, kappa=0.05, block_size=1, window_model=MODEL),
    "window": Window(20, tail_tokens=33, block_size=4),
    "window, limited": Window(40, max_repaired=0.1, window_model=MODEL),
    "blocks": Window(8, 8, 4, rule=Blocks(0.05), max_repaired=0.3),
    "tokens": Window(8, 8, 4, rule=Tokens(0.05), max_repaired=0.3),
    "edited": Window(8, 8, 32, rule=Edited(0.1)),
    "combined": Window(64, 64, 1, rule=Combined(0.06), max_repaired=0.125),
    "contiguous": Window(8, 33, 4, rule=Contiguous(0.05)),
    "question": Window(40, 33, 4, rule=Question(0.05), max_repaired=0.3),
}
PINNED = {
    "exact": "8e6e2abb9957bfa8",
    "direct reuse": "7f2d6d4be09df78e",
    "cacheblend": "52460c4cbae37033",
    "published": "d46204231aa76ee7",
    "published, predicted": "52e119c4cbf2f69a",
    "window": "9d94e69370761d61",
    "window, limited": "af13f31f26d52660",
    "blocks": "c266d0344380454b",
    "tokens": "51e30714cab4540b",
    "edited": "55dbfa04e9cb28b8",
    "combined": "5c572d91b84a1de8",
    "contiguous": "5f050c83934ee596",
    "question": "25d9b5ea96bf0324",
}


def cases():
    """Two versions of 60 to 500 tokens, and the state of the old one."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        tokens = int(rng.integers(60, 500))
        old = random_ids(seed, tokens)
        edits, cursor = [], 0
        for start in np.sort(rng.choice(np.arange(8, tokens - 40), int(rng.integers(1, 4)), False)):
            at = max(int(start), cursor)
            removed = int(rng.integers(0, 12))
            edits.append((at, removed, int(rng.integers(0, 20))))
            cursor = at + removed + 1
        exact = np.arange(tokens) < rng.integers(0, tokens)
        mass = np.tril(rng.random((-(-tokens // 32),) * 2).astype(np.float32))
        yield (
            align(old, edited(old, edits)),
            {
                "origins": np.where(exact, 0, rng.integers(-2, 4, tokens)).astype(np.int16),
                "available": rng.random(tokens) > rng.choice([0, 0.1]),
                "scores": rng.random(tokens).astype(np.float32),
                "block_map": BlockMap(32, mass / mass.sum(1, keepdims=True)) if seed % 5 else None,
            },
        )


@pytest.fixture(scope="module")
def states():
    return list(cases())


@pytest.mark.parametrize("name", METHODS)
def test_plans_are_those_that_were_pinned(states, name):
    digest = blake2b(digest_size=8)
    for alignment, state in states:
        plan = METHODS[name].plan(alignment, **state)
        digest.update(plan.labels.tobytes() + plan.origins(state["origins"]).tobytes())
    assert digest.hexdigest() == PINNED[name]
