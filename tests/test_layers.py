"""The import graph: imports go from a higher layer to a lower one, and no modules form a ring.

Imports inside functions and under `TYPE_CHECKING` count too.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
ROOTS = {
    "patchkv_agents": "patchkv_agents",
    "patchkv_kernels": "kernels/patchkv_kernels",
    "patchkv_evals": "evals/patchkv_evals",
    "patchkv_langchain": "integrations/patchkv_langchain",
    "patchkv_langgraph": "integrations/patchkv_langgraph",
    "patchkv_server": "integrations/patchkv_server",
}

# From the bottom to the top. A package may import itself and what stands in a row below its own.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("ranges", "jobs", "lazy", "divergence", "estimates", "console", "files"),
    ("patchkv_kernels",),
    ("alignment",),
    ("context",),
    ("checkpoint", "progress"),
    ("recovery",),
    ("records",),
    ("backends",),
    ("engine",),
    ("telemetry", "provenance"),
    ("profiling",),
    ("patchkv_langgraph",),
    ("patchkv_langchain", "patchkv_server", "patchkv_evals"),
    ("cli",),
)

LEVELS = {layer: level for level, layers in enumerate(LAYERS) for layer in layers}


@cache
def import_graph() -> dict[str, frozenset[str]]:
    """The project's modules, each with the modules of the project that it imports."""
    files = {}
    for folder in ROOTS.values():
        for path in (REPOSITORY / folder).rglob("*.py"):
            parts = path.relative_to((REPOSITORY / folder).parent).with_suffix("").parts
            files[".".join(parts).removesuffix(".__init__")] = path
    return {module: imports(module, path, files) for module, path in files.items()}


def imports(module: str, path: Path, modules: dict[str, Path]) -> frozenset[str]:
    named: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: name the module in full"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                named.add(full if full in modules else str(node.module))
    return frozenset(named & modules.keys() - {module})


def layer(module: str) -> str:
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == "patchkv_agents" and rest else first


def upward_imports() -> set[tuple[str, str]]:
    """Pairs of importer and imported where the arrow goes up. `patchkv_agents` is a facade."""
    found = set()
    for module, imported in import_graph().items():
        for target in imported:
            if "patchkv_agents" in (module, target) or layer(module) == layer(target):
                continue
            if LEVELS[layer(target)] >= LEVELS[layer(module)]:
                found.add((module, target))
    return found


def rings() -> set[frozenset[str]]:
    """The strongly connected components of two modules and more (Tarjan's algorithm)."""
    graph, found = import_graph(), set()
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for target in graph[module]:
            if target not in order:
                visit(target)
            if target in stack:
                lowest[module] = min(lowest[module], lowest[target])
        if lowest[module] == order[module]:
            start = stack.index(module)
            if len(stack) - start > 1:
                found.add(frozenset(stack[start:]))
            del stack[start:]

    for module in graph:
        if module not in order:
            visit(module)
    return found


def test_every_package_has_a_layer() -> None:
    missing = {layer(module) for module in import_graph()} - LEVELS.keys() - {"patchkv_agents"}
    assert not missing, f"give these a row in LAYERS: {sorted(missing)}"


def test_imports_go_down() -> None:
    new = upward_imports()
    listing = "\n".join(f"{importer} imports {imported}" for importer, imported in sorted(new))
    assert not new, f"these imports go up or sideways:\n{listing}"


def test_no_modules_form_a_ring() -> None:
    new = [" <-> ".join(sorted(ring)) for ring in rings()]
    assert not new, "these modules import each other:\n" + "\n".join(sorted(new))


def test_the_graph_sees_imports_in_functions_and_for_types(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from package import one\n"
        "def function():\n    import package.two\n"
        "    from package.three import name\n"
    )
    modules = dict.fromkeys(["package.one", "package.two", "package.three", "package"], path)
    assert imports("m", path, modules) == {"package.one", "package.two", "package.three"}


@pytest.mark.parametrize("folder", sorted(ROOTS.values()))
def test_every_root_is_read(folder: str) -> None:
    assert any((REPOSITORY / folder).rglob("*.py"))


def test_the_architecture_page_names_files_that_exist() -> None:
    """`docs/architecture.md` is how a reader finds a file; whoever moves one changes the page."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = [REPOSITORY / folder for folder in (*ROOTS.values(), "tests")]
    paths = [f"/{path.as_posix()}" for folder in folders for path in folder.rglob("*.py")]
    named = set(re.findall(r"[a-z_]+(?:/[a-z_]+)*\.py", text))
    assert len(named) > 40
    missing = sorted(name for name in named if not any(path.endswith(f"/{name}") for path in paths))
    assert not missing, f"docs/architecture.md names what is gone: {missing}"
