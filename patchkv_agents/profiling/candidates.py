"""The policies that a calibration tries. All of them store losslessly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from patchkv_agents.profiling.choosing import Candidate
from patchkv_agents.profiling.windows import WindowFit
from patchkv_agents.recovery import (
    Blocks,
    Combined,
    Contiguous,
    Edited,
    Published,
    Question,
    RecoveryPolicy,
    Window,
)

_SHARE = 0.03
"""Of the suffix, for rows beside window and tail."""


def window_and_tail(window: int, tail: int, block_size: int, **changes: Any) -> RecoveryPolicy:
    """A policy of a window and a tail, which has no limit.

    Args:
        window, tail, block_size: in tokens.
        changes: further fields of the method, by name.
    """
    return RecoveryPolicy("trial", Window(window, tail, block_size, **changes))


def fixed_lengths(
    windows_and_tails: Iterable[tuple[int, int]], block_size: int, max_repaired: float
) -> list[Candidate]:
    """A fixed window behind each edit and a query tail, within a share of the suffix."""
    return [
        Candidate(
            f"window {window}, tail {tail}",
            window_and_tail(window, tail, block_size, max_repaired=max_repaired),
        )
        for window, tail in windows_and_tails
    ]


def published_rules(
    window: WindowFit, kappas: Iterable[float], block_size: int
) -> dict[float, RecoveryPolicy]:
    """The paper's rules, without a limit: a predicted window and each share of tokens (kappa)."""
    return {
        kappa: RecoveryPolicy(
            "trial",
            Published(0, kappa=kappa, block_size=block_size, window_model=window.model),
        )
        for kappa in kappas
    }


def options(base: RecoveryPolicy, window: WindowFit) -> list[Candidate]:
    """What may be added to a window and a tail, and what may take the window's place.

    Args:
        base: the window and the tail.
        window: the regression.
    """
    method = base.method
    if not isinstance(method, Window):
        raise TypeError("options are of a method with a window")
    # In place of half the window: beside all of it, the limit would leave no room.
    half = base.varied(window_tokens=method.window_tokens // 2)
    rules = {
        "attention": Blocks(_SHARE),
        "edited": Edited(_SHARE),
        "combined": Combined(_SHARE),
        "question": Question(_SHARE),
    }
    return [
        Candidate("window and tail", base),
        Candidate("in blocks of 32 tokens", base.varied(block_size=32)),
        Candidate(f"attention {_SHARE / 2:.1%}", base.varied(rule=Blocks(_SHARE / 2)), 1),
        *(
            Candidate(
                f"half the window, {name} {_SHARE:.1%}",
                half.varied(rule=rule),
                1 if name == "attention" else 2,
            )
            for name, rule in rules.items()
        ),
        Candidate(
            f"half the window, attention {_SHARE:.1%} in blocks of 32",
            half.varied(rule=Blocks(_SHARE), block_size=32),
            1,
        ),
        Candidate("contiguous", base.varied(rule=Contiguous())),
        Candidate("predicted window", base.varied(window_tokens=0, window_model=window.model), 1),
    ]


def frontier(block_size: int) -> list[Candidate]:
    """What more rows than a limit allows would buy, by each rule. To be reported, not chosen."""
    plain = {window: window_and_tail(window, 64, block_size) for window in (64, 128, 256, 512)}
    share = 2 * _SHARE
    rules = {"attention": Blocks(share), "edited": Edited(share), "combined": Combined(share)}
    return [
        *(Candidate(f"window {window}, tail 64", policy) for window, policy in plain.items()),
        *(
            Candidate(f"{name} {share:.1%}, window 64, tail 64", plain[64].varied(rule=rule))
            for name, rule in rules.items()
        ),
        *(
            Candidate(
                f"contiguous, rows of window {window} and tail 64",
                policy.varied(rule=Contiguous()),
            )
            for window, policy in plain.items()
        ),
    ]
