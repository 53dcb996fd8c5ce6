"""The methods by name. A new one is a file beside this one and an entry here."""

from __future__ import annotations

from patchkv_agents.baselines.ablations import ABLATIONS
from patchkv_agents.baselines.cacheblend import CACHEBLEND
from patchkv_agents.baselines.cacheblend_released import CACHEBLEND_RELEASED
from patchkv_agents.baselines.direct_reuse import DIRECT_REUSE
from patchkv_agents.baselines.prefix_cache import PREFIX_CACHE
from patchkv_agents.errors import InputError
from patchkv_agents.recovery import RecoveryPolicy

_METHODS = {
    policy.name: policy
    for policy in (
        PREFIX_CACHE,
        DIRECT_REUSE,
        CACHEBLEND,
        CACHEBLEND_RELEASED,
        RecoveryPolicy.published(),
        RecoveryPolicy.default(),
        *ABLATIONS,
    )
}


def method_names() -> tuple[str, ...]:
    """Names of all methods but the full prefill, which is what they are compared with."""
    return tuple(_METHODS)


def method(name: str) -> RecoveryPolicy:
    """The policy that runs a method.

    Raises:
        InputError: there is no method of this name.
    """
    if name not in _METHODS:
        raise InputError(f"there is no method '{name}': use one of {', '.join(_METHODS)}")
    return _METHODS[name]


def policy_named(name: str) -> RecoveryPolicy:
    """The policy of a name: `exact`, `default`, or that of a method.

    Raises:
        InputError: there is no policy of this name.
    """
    if name == "exact":
        return RecoveryPolicy.exact()
    if name == "default":
        return RecoveryPolicy.default()
    return method(name)
