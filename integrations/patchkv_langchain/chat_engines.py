"""Engines that chat models share, loaded once at first use."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from patchkv_agents.engine import Engine
    from patchkv_agents.profiling.profile import Profile
    from patchkv_agents.recovery import RecoveryPolicy

_Key = tuple[Any, ...]
_engines: WeakValueDictionary[_Key, Engine] = WeakValueDictionary()
_loading: dict[_Key, threading.Lock] = {}
_lock = threading.Lock()


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
    simple = str, int, float, bool, type(None)
    # Objects, such as stores, are the same only if they are one.
    key = model, *((k, v if isinstance(v, simple) else id(v)) for k, v in sorted(options.items()))
    with _lock:
        turn = _loading.setdefault(key, threading.Lock())
    with turn:
        engine = _engines.get(key)
        if engine is None:
            from patchkv_agents.engine import Engine

            engine = Engine.from_pretrained(model, **options)
            _engines[key] = engine
        return engine


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
    from patchkv_agents.baselines import policy_named

    return policy_named(policy, profile)


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
    from patchkv_agents.profiling.profile import Profile

    loaded = profile if isinstance(profile, Profile) else Profile.load(profile)
    return loaded.policies_sha256, loaded.has_passed


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
