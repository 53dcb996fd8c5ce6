"""The methods by name. A new one is a file beside this one and an entry here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchkv_agents.baselines.ablations import ablations
from patchkv_agents.baselines.cacheblend import CACHEBLEND
from patchkv_agents.baselines.cacheblend_released import CACHEBLEND_RELEASED
from patchkv_agents.baselines.direct_reuse import DIRECT_REUSE
from patchkv_agents.baselines.prefix_cache import PREFIX_CACHE
from patchkv_agents.checkpoint.precision import PrecisionPolicy
from patchkv_agents.errors import InputError
from patchkv_agents.recovery import RecoveryPolicy, RecoverySetup

if TYPE_CHECKING:
    from patchkv_agents.recovery.profile import Profile


def _methods(profile: Profile | None) -> dict[str, RecoverySetup]:
    storage = PrecisionPolicy() if profile is None else profile.storage
    published = RecoverySetup(RecoveryPolicy.published(), storage)
    patchkv = RecoverySetup(RecoveryPolicy.default(), storage)
    if profile is not None:
        published, patchkv = RecoverySetup(profile.published, storage), profile.setup
    baselines = PREFIX_CACHE, DIRECT_REUSE, CACHEBLEND, CACHEBLEND_RELEASED
    methods = (*map(RecoverySetup, baselines), published, patchkv, *ablations(patchkv))
    return {setup.name: setup for setup in methods}


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
