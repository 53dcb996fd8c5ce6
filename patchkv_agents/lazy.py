"""Public names of a package that are imported at first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, module_of: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's `__getattr__` and `__dir__`, so that importing it stays fast (PEP 562).

    Args:
        package: its `__name__`.
        module_of: the module of each public name.
    """
    namespace = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        namespace[name] = value  # the next access does not come here
        return value

    def names() -> list[str]:
        return sorted({*namespace, *module_of})

    return get, names
