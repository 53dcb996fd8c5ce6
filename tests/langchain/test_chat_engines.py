"""Which engine a chat model gets: its own, or one that another of the same settings has."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from patchkv_agents.checkpoint.stores import MemoryStore
from patchkv_agents.engine import Engine
from patchkv_agents.recovery import RecoveryPolicy, Window
from patchkv_langchain import ChatPatchKV
from patchkv_langchain.chat_engines import shared_engine


def policy(window: int) -> RecoveryPolicy:
    return RecoveryPolicy("mine", Window(window, tail_tokens=8, block_size=32))


class Loaded:
    """Stands for an engine; can be referred to weakly, as engines are."""


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "from_pretrained", lambda name, **options: Loaded())


@pytest.mark.usefixtures("loading")
@pytest.mark.parametrize(
    ("one", "equal", "other"),
    [
        (Path("/tmp/offload"), Path("/tmp/offload"), Path("/tmp/others")),
        (Path("/tmp/offload"), "/tmp/offload", "/tmp/others"),
        (policy(8), policy(8), policy(9)),
        ({"cpu": "8GiB"}, {"cpu": "8GiB"}, {"cpu": "4GiB"}),
        ([Path("a"), 1], [Path("a"), 1], [Path("a"), True]),
        (1, 1, True),
    ],
)
def test_equal_options_share_an_engine(one: Any, equal: Any, other: Any) -> None:
    """Equal paths were two keys: the weights were loaded twice."""
    first, again, another = (shared_engine("m", {"option": each}) for each in (one, equal, other))
    assert first is again
    assert another is not first


@pytest.mark.usefixtures("loading")
@pytest.mark.parametrize("make", [MemoryStore, lambda: {"a": object()}, lambda: {object()}])
def test_an_option_that_is_gone_does_not_lend_its_engine_to_another(make: Any) -> None:
    """Objects were known by their addresses, which the next object can have."""
    engines = [shared_engine("m", {"option": make()}) for _ in range(20)]
    assert len({id(engine) for engine in engines}) == len(engines)


@pytest.mark.usefixtures("loading")
def test_options_go_with_the_engine() -> None:
    store = MemoryStore()
    shared_engine("m", {"option": store})
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None


def test_a_copy_has_the_engine_of_its_original(chat_engine: Engine) -> None:
    """Agents copy their models; an engine's locks and weights cannot be copied."""
    model = ChatPatchKV(engine=chat_engine, max_tokens=3)
    for copied in (copy.deepcopy(model), model.model_copy(deep=True), copy.copy(model)):
        assert copied.load() is chat_engine
        assert copied.invoke("Hi").content == model.invoke("Hi").content
    bound = model.bind(seed=1)
    assert copy.deepcopy(bound).bound.load() is chat_engine  # type: ignore[attr-defined]


def test_a_copy_keeps_the_store_of_its_original(tiny_model_folder: str) -> None:
    store = MemoryStore()
    model = ChatPatchKV(model=tiny_model_folder, model_kwargs={"store": store})
    copied = copy.deepcopy(model)
    assert copied.model_kwargs["store"] is store
    assert copied.load() is model.load()
