"""Packages whose public names are imported at first use."""

from __future__ import annotations

from importlib import import_module

import pytest

from patchkv_agents.lazy import lazy_exports

PACKAGES = [
    "patchkv_agents",
    "patchkv_agents.engine",
    "patchkv_langchain",
    "patchkv_langgraph",
    "patchkv_server",
]


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_there_and_no_other(name: str) -> None:
    package = import_module(name)
    for public in package.__all__:
        assert public in dir(package)
        assert getattr(package, public).__name__ == public
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = package.nothing


def test_a_name_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    package = import_module("patchkv_agents.engine")
    monkeypatch.delitem(vars(package), "Reply", raising=False)
    get, names = lazy_exports(package.__name__, {"Reply": "patchkv_agents.engine.reply"})
    assert "Reply" in names() and "Reply" not in vars(package)
    assert get("Reply") is vars(package)["Reply"]
