"""The policies that a calibration tries. All of them store losslessly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from patchkv_agents.profiling.choosing import Candidate
from patchkv_agents.profiling.windows import WindowFit
from patchkv_agents.recovery import RecoveryPolicy, Selection

_SHARE = 0.03
"""Of the suffix, for rows beside window and tail."""
_NAMES = {
    Selection.BLOCKS: "attention",
    Selection.EDITED: "edited",
    Selection.COMBINED: "combined",
    Selection.QUESTION: "question",
}


def window_and_tail(window: int, tail: int, block_size: int, **changes: Any) -> RecoveryPolicy:
    """A policy of a window and a tail, which stores losslessly and has no limit.

    Args:
        window, tail, block_size: in tokens.
        changes: further fields of the policy, by name.
    """
    policy = RecoveryPolicy(
        "trial",
        window_tokens=window,
        attention_fraction=0.0,
        tail_tokens=tail,
        block_size=block_size,
    )
    return replace(policy, **changes)


def fixed_lengths(
    windows_and_tails: Iterable[tuple[int, int]], block_size: int, most_repaired: float
) -> list[Candidate]:
    """A fixed window behind each edit and a query tail, within a share of the suffix."""
    return [
        Candidate(
            f"window {window}, tail {tail}",
            window_and_tail(window, tail, block_size, most_repaired=most_repaired),
        )
        for window, tail in windows_and_tails
    ]


def published_rules(
    window: WindowFit, kappas: Iterable[float], block_size: int
) -> dict[float, RecoveryPolicy]:
    """The paper's rules, without a limit: a predicted window and each share of tokens (kappa)."""
    return {
        kappa: window_and_tail(
            0,
            1,
            block_size,
            window_model=window.model,
            attention_fraction=kappa,
            selection=Selection.TOKENS,
        )
        for kappa in kappas
    }


def options(base: RecoveryPolicy, window: WindowFit) -> list[Candidate]:
    """What may be added to a window and a tail, and what may take the window's place.

    Args:
        base: the window and the tail.
        window: the regression.
    """
    half = replace(base, window_tokens=(base.window_tokens or 0) // 2, attention_fraction=_SHARE)
    rules = (Selection.BLOCKS, Selection.EDITED, Selection.COMBINED, Selection.QUESTION)
    return [
        Candidate("window and tail", base),
        Candidate("in blocks of 32 tokens", replace(base, block_size=32)),
        Candidate(f"attention {_SHARE / 2:.1%}", replace(base, attention_fraction=_SHARE / 2), 1),
        *(
            # In place of half the window: beside all of it, the limit would leave no room.
            Candidate(
                f"half the window, {_NAMES[rule]} {_SHARE:.1%}",
                replace(half, selection=rule),
                2 if rule.needs_map or rule is Selection.QUESTION else 1,
            )
            for rule in rules
        ),
        Candidate(
            f"half the window, attention {_SHARE:.1%} in blocks of 32",
            replace(half, block_size=32),
            1,
        ),
        Candidate("contiguous", replace(base, selection=Selection.CONTIGUOUS)),
        Candidate("predicted window", replace(base, window_tokens=0, window_model=window.model), 1),
    ]


def frontier(block_size: int) -> list[Candidate]:
    """What more rows than a limit allows would buy, by each rule. To be reported, not chosen."""
    plain = {window: window_and_tail(window, 64, block_size) for window in (64, 128, 256, 512)}
    rules = (Selection.BLOCKS, Selection.EDITED, Selection.COMBINED)
    return [
        *(Candidate(f"window {window}, tail 64", policy) for window, policy in plain.items()),
        *(
            Candidate(
                f"{_NAMES[rule]} {2 * _SHARE:.1%}, window 64, tail 64",
                replace(plain[64], selection=rule, attention_fraction=2 * _SHARE),
            )
            for rule in rules
        ),
        *(
            Candidate(
                f"contiguous, rows of window {window} and tail 64",
                replace(policy, selection=Selection.CONTIGUOUS),
            )
            for window, policy in plain.items()
        ),
    ]
