"""Fixtures that several parts use. The embedded model is loaded once per session."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# No test uses the network; a lookup that would fails at once instead of after retries.
os.environ["HF_HUB_OFFLINE"] = "1"
# Triton kernels run in its interpreter; it reads this when it is imported, which torch may do. What
# compiles kernels runs in a process of its own.
os.environ["TRITON_INTERPRET"] = "1"

# Beside other test processes (`make test` runs two), torch takes this one's share of the cores. It
# reads this when it is imported.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ["OMP_NUM_THREADS"] = str(max(1, share))

# Machines are shared: how long one example takes says nothing.
settings.register_profile("patchkv", deadline=None)
settings.load_profile("patchkv")


REPOSITORY = Path(__file__).resolve().parent.parent
CORE = ("alignment", "backends", "checkpoint", "context", "engine", "recovery")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the core's fast tests, and run the longest first, so that two processes end together."""
    for item in items:
        folder = item.path.relative_to(REPOSITORY / "tests").parts[0]
        is_slow = item.get_closest_marker("slow") or "smollm2_model" in item.fixturenames
        if folder in CORE and not is_slow:
            item.add_marker(pytest.mark.core)
    items.sort(key=lambda item: item.get_closest_marker("smoke") is None)


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> PreTrainedTokenizerBase:
    """The embedded model's tokenizer, with our chat template. Do not change it."""
    from patchkv_agents.backends.transformers.loading import load_tokenizer

    return load_tokenizer("smollm2")


@pytest.fixture(scope="session")
def smollm2_model() -> PreTrainedModel:
    """The embedded model in float32 on the CPU. A test that changes it puts it back."""
    from patchkv_agents.backends.transformers.loading import load_model

    model, _ = load_model("smollm2", device="cpu")
    return model


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of shared test data beside the checkout, or `PATCHKV_SHARED`."""
    folder = Path(os.environ.get("PATCHKV_SHARED", REPOSITORY.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared test data in {folder}; set PATCHKV_SHARED to their folder")
    return folder
