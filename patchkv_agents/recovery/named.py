"""Methods by name, with the storage that they are measured with, and PatchKV's ablations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.errors import InputError
from patchkv_agents.recovery.methods.registry import METHODS
from patchkv_agents.recovery.methods.rules import Blocks, Contiguous, Edited, Question
from patchkv_agents.recovery.methods.window import Window
from patchkv_agents.recovery.policy import RecoveryPolicy
from patchkv_agents.recovery.profile import Profile
from patchkv_agents.recovery.setup import RecoverySetup
from patchkv_kernels import PayloadFormat

_SHARE = 0.06
_CHANGES: dict[str, Callable[[Window], Window]] = {
    "patchkv_attention": lambda ours: replace(ours, rule=Blocks(_SHARE)),
    "patchkv_no_window": lambda ours: replace(ours, window_tokens=0, window_model=None),
    "patchkv_no_tail": lambda ours: replace(ours, tail_tokens=1),
    "patchkv_contiguous": lambda ours: replace(
        ours, rule=Contiguous(0.0 if ours.rule is None else ours.rule.fraction)
    ),
    "patchkv_edited": lambda ours: replace(ours, rule=Edited(_SHARE)),
    "patchkv_no_attention": lambda ours: replace(ours, rule=None),
    "patchkv_question": lambda ours: replace(ours, rule=Question(_SHARE)),
    "patchkv_uncapped": lambda ours: replace(ours, max_repaired=None),
}
"""What each ablation changes. One that the method has already leaves it as it is."""
_FORMATS = {
    "patchkv_fp16": PayloadFormat.F16,
    "patchkv_int8": PayloadFormat.K8V8,
    "patchkv_int4": PayloadFormat.K4V4,
}
"""Where all rows are stored in one format; `patchkv_int4` has 4-bit keys too, which nothing else
uses, to compare with published figures."""


def ablations(setup: RecoverySetup) -> tuple[RecoverySetup, ...]:
    """`setup` with one part changed, in every way there is; of a method that has such parts."""
    ours = setup.policy.method
    changed = [
        RecoverySetup(RecoveryPolicy(name, change(ours)), setup.storage)
        for name, change in _CHANGES.items()
        if isinstance(ours, Window)
    ]
    stored = [
        RecoverySetup(RecoveryPolicy(name, ours), PrecisionPolicy.fixed(format))
        for name, format in _FORMATS.items()
    ]
    return (*changed, *stored)


def _methods(profile: Profile | None) -> dict[str, RecoverySetup]:
    storage = PrecisionPolicy() if profile is None else profile.storage
    setups = {name: RecoverySetup(RecoveryPolicy.named(name)) for name in METHODS}
    own = (RecoveryPolicy.published(), RecoveryPolicy.default())
    if profile is not None:
        own = (profile.published, profile.policy)
    setups |= {policy.name: RecoverySetup(policy, storage) for policy in own}
    return setups | {each.name: each for each in ablations(setups["patchkv"])}


_METHODS = _methods(None)


def method_names() -> tuple[str, ...]:
    """Names of all methods but the full prefill, which is what they are compared with."""
    return tuple(_METHODS)


def method(name: str, profile: Profile | None = None) -> RecoverySetup:
    """The policy that runs a method, and how rows are stored for it.

    Args:
        name: of the method.
        profile: from which PatchKV, as published and ours, and its ablations are taken; their
            defaults are if it is left out.

    Raises:
        InputError: there is no method of this name.
    """
    methods = _METHODS if profile is None else _methods(profile)
    if name not in methods:
        raise InputError(f"there is no method '{name}': use one of {', '.join(methods)}")
    return methods[name]


def setup_named(name: str, profile: Profile | None = None) -> RecoverySetup:
    """The policy and storage of a name: `exact`, `default`, or that of a method.

    Args:
        name: of the policy.
        profile: as for `method`; its policy is then the default.

    Raises:
        InputError: there is no policy of this name.
    """
    if name == "exact":
        return RecoverySetup(RecoveryPolicy.exact())
    return method("patchkv" if name == "default" else name, profile)
