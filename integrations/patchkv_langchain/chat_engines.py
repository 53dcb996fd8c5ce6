"""Engines that chat models share, loaded once at first use."""

from __future__ import annotations

import json
import threading
from collections.abc import Hashable, Mapping
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from patchkv_agents.engine import Engine
    from patchkv_agents.recovery import RecoveryPolicy
    from patchkv_agents.recovery.profile import Profile

_engines: WeakValueDictionary[Hashable, Engine] = WeakValueDictionary()
_loading: WeakValueDictionary[Hashable, _Loading] = WeakValueDictionary()
_lock = threading.Lock()


class _Loading:
    """Held by whoever loads an engine, so that others with the same settings wait for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class _Identity:
    """An object that equals itself alone. Keeps it, so that no other gets its address."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class EnginesByName(dict[str, "Engine"]):
    """Engines of one chat model. Its deep copies share them, and what is pickled is without."""

    def __deepcopy__(self, memo: Any) -> EnginesByName:
        return self

    def __reduce__(self) -> tuple[type[EnginesByName], tuple[()]]:
        return EnginesByName, ()


def shared_engine(model: str, options: Mapping[str, Any]) -> Engine:
    """The engine of a model, loaded unless another chat model with the same settings has it.

    An engine lives as long as somebody uses it.

    Args:
        model: as for `Engine.from_pretrained`.
        options: further arguments of that.

    Raises:
        ModelNotFoundError, ProfileError, UnsupportedModelError: see `Engine.from_pretrained`.
    """
    key = model, *((name, _settings_key(value)) for name, value in sorted(options.items()))
    with _lock:
        loading = _loading.setdefault(key, _Loading())
    with loading.lock:
        engine = _engines.get(key)
        if engine is None:
            from patchkv_agents.engine import Engine

            engine = Engine.from_pretrained(model, **options)
            _engines[key] = engine
        return engine


def _settings_key(value: Any) -> Hashable:
    """What is equal for equal settings. Objects that are no values, such as stores, are their own.

    The key holds such objects, so it is of use as long as they could be meant.
    """
    if isinstance(value, PurePath):
        return str, str(value)
    if isinstance(value, Mapping):
        return "mapping", tuple((key, _settings_key(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return "list", tuple(map(_settings_key, value))
    try:
        hash(value)
    except TypeError:
        return _Identity(value)
    return type(value), value  # True equals 1


def policy_of(
    policy: str | RecoveryPolicy | None, profile: Profile | None = None
) -> RecoveryPolicy | None:
    """The policy of a name: `exact`, `default`, or that of a method; None stays None.

    Args:
        policy: the name, or a policy, which is returned.
        profile: of the model, from which methods are taken.

    Raises:
        InputError: there is no policy of this name.
    """
    if not isinstance(policy, str):
        return policy
    from patchkv_agents.recovery.named import setup_named

    return setup_named(policy, profile).policy


def answers_key(engine: Engine | None, settings: Any) -> str:
    """A digest of what decides answers besides LangChain's own parameters.

    Args:
        engine: that was given to the chat model, whose name then says nothing; None if it is loaded
            by its name.
        settings: of the chat model.
    """
    given = engine and (engine.fingerprint, engine.tokenizer.chat_template, engine.policy)
    return blake2b(repr((given, settings)).encode(), digest_size=16).hexdigest()


def profile_key(profile: Any) -> tuple[str, bool] | None:
    """What a profile (a file, a name, a `Profile` or None) has to say about answers."""
    if profile is None:
        return None
    from patchkv_agents.recovery.profile import Profile

    loaded = profile if isinstance(profile, Profile) else Profile.load(profile)
    return loaded.setups_sha256, loaded.has_passed


def context_tokens(model: str) -> int | None:
    """The longest context of a model, as far as files on this machine say it. Loads nothing."""
    from patchkv_agents.backends.transformers.embedded import CONTEXT_TOKENS, EMBEDDED_NAME

    if model == EMBEDDED_NAME:
        return CONTEXT_TOKENS
    config = Path(model).expanduser() / "config.json"
    if not config.is_file():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json")
        if not isinstance(cached, str):
            return None
        config = Path(cached)
    tokens = json.loads(config.read_text(encoding="utf-8")).get("max_position_embeddings")
    return tokens if isinstance(tokens, int) else None
