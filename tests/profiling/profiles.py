"""A profile to test with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.recovery import RecoveryPolicy, WindowModel
from patchkv_agents.recovery.profile import (
    DataSource,
    Measure,
    Profile,
    Validation,
    setup_sha256,
)

POLICY = RecoveryPolicy.default().varied(
    window_tokens=32,
    window_model=WindowModel(0.5, (0.1, 0.2, -0.3, 0.0, 0.0, 1e-3)),
    max_repaired=0.1,
)


def profile_of(policy: RecoveryPolicy = POLICY, **fields: Any) -> Profile:
    given: dict[str, Any] = {
        "model": "smollm2",
        "fingerprint": "f" * 32,
        "policy": policy,
        "published": RecoveryPolicy.published(),
        "storage": PrecisionPolicy(),
        "data": (DataSource("pairs.jsonl", "ab" * 32, 24, 8),),
        "fit": {"calibration_tasks": ["a", "b"], "window": {"tau": 0.25}},
        "versions": {"torch": "2.13.0"},
        "created": "2031-01-21T17:41:05Z",
        "command": "patchkv profile smollm2 --quick",
    }
    return Profile(**{**given, **fields})


def passed(profile: Profile, *reasons: str) -> Profile:
    """The profile with a validation of its policy; not passed where reasons are given."""
    validation = Validation(
        reasons=reasons,
        measures={"first_token_kl_median": Measure(0.001, 0.0005, 0.002, 24)},
        thresholds={"first_token_kl_median": 0.005},
        data=(DataSource("pairs.jsonl", "cd" * 32, 24, 8),),
        setup_sha256=setup_sha256(profile.setup),
        fingerprint=profile.fingerprint,
        created="2031-01-21T18:00:00Z",
        command="patchkv validate smollm2",
        versions={"torch": "2.13.0"},
    )
    return replace(profile, validation=validation)
