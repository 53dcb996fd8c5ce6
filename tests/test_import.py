"""Importing the package is cheap, and what it promises to export is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import patchkv_agents
import patchkv_agents.engine

HEAVY = ("torch", "transformers", "langgraph", "langchain_core", "sklearn")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", ["patchkv_agents", "patchkv_agents.engine"])
def test_import_loads_nothing_heavy(module: str) -> None:
    done = run_python(f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "module",
    ["patchkv_agents.context", "patchkv_agents.context.answers", "patchkv_agents.alignment"],
)
def test_context_and_alignment_need_no_torch(module: str) -> None:
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in HEAVY)
    done = run_python(f"import sys; {blocked}; import {module}; print('imported')")
    assert done.stdout.strip() == "imported", done.stderr


@pytest.mark.parametrize("package", [patchkv_agents, patchkv_agents.engine])
def test_every_exported_name_is_there(package) -> None:
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
        assert name in dir(package)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = patchkv_agents.Nothing


def test_top_folders_are_not_packages() -> None:
    """A package called `kernels` or `evals` would shadow other projects' packages."""
    code = (
        "import importlib.util as u\n"
        "for name in ('kernels', 'evals', 'integrations'):\n"
        "    spec = u.find_spec(name)\n"
        "    assert spec is None or spec.origin is None or 'site-packages' in spec.origin, spec\n"
        "import patchkv_kernels, patchkv_evals\n"
        "print('fine')"
    )
    done = run_python(code)
    assert done.stdout.strip() == "fine", done.stderr
