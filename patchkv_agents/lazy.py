"""Public names of a package that are imported at first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, module_of: Mapping[str, str], *, installed_by: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's `__getattr__` and `__dir__`, so that importing it stays fast (PEP 562).

    Args:
        package: its `__name__`.
        module_of: the module of each public name.
        installed_by: what to give to `pip install` for the packages that these need and that may
            not be there.

    Raises:
        ImportError: from what it makes: such a package is not there.
    """
    wanted = installed_by or {}
    namespace = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(module_of[name]), name)
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            if missing not in wanted:
                raise
            raise ImportError(
                f"{name} needs {missing}, which is not installed: pip install '{wanted[missing]}'",
                name=error.name,
            ) from error
        namespace[name] = value  # the next access does not come here
        return value

    def names() -> list[str]:
        return sorted({*namespace, *module_of})

    return get, names
