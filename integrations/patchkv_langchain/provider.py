"""`init_chat_model("patchkv:smollm2")`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patchkv_agents.errors import InputError

PROVIDER = "patchkv"


def register_provider() -> None:
    """Make `patchkv:` a prefix of model names in LangChain, in this process.

    From here on `init_chat_model("patchkv:smollm2", policy="default")`, and what takes such names,
    as `create_agent("patchkv:smollm2", ...)` does, make a `ChatPatchKV`. LangChain has a fixed
    table of providers and no way to add one from outside, so this enters it there. Registering
    again changes nothing.

    Raises:
        InputError: this release of LangChain has no such table; use `ChatPatchKV(model=...)`.
    """
    from langchain.chat_models import base

    table = getattr(base, "_BUILTIN_PROVIDERS", None)
    if not isinstance(table, dict) or not all(len(entry) == 3 for entry in table.values()):
        raise InputError(
            "this release of LangChain keeps its providers in another way: use "
            "ChatPatchKV(model='smollm2') in place of init_chat_model('patchkv:smollm2')"
        )
    table[PROVIDER] = ("patchkv_langchain", "ChatPatchKV", _create)


def _create(cls: Callable[..., Any], **arguments: Any) -> Any:
    return cls(**arguments)
